// One draw from a row of logits: temperature, top-k, min-p, top-p, then the inverse of the distribution in id order.
//
// Sums are of integers, so that they do not depend on who adds what first: a row gives the same token with any number
// of threads, on any device, and whatever else is in the batch. A weight exp((score - peak) / temperature) becomes a
// multiple of 2^-e, where e is as large as the row's total allows; the exponential itself is in double precision.
//
// Scores are ranked by integer keys in their order, ties to the lowest id. What the filters leave is a Cut: all above a
// key, and the first few of those that have it.
#pragma once

#include <cmath>

#include "numbers.cuh"
#include "sampling.h"

namespace dflow {

// -- random numbers: Philox 4x64 with ten rounds, as numpy.random.Philox --

DFLOW_HD uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

struct Philox {
  uint64_t counter[4];
  uint64_t key[2];

  DFLOW_HD void round() {
    constexpr uint64_t kFactors[] = {0xD2E7470EE14C6C93U, 0xCA5A826395121157U};
    uint64_t const high0 = high_product(kFactors[0], counter[0]);
    uint64_t const high1 = high_product(kFactors[1], counter[2]);
    uint64_t const low0 = kFactors[0] * counter[0];
    uint64_t const low1 = kFactors[1] * counter[2];
    counter[0] = high1 ^ counter[1] ^ key[0];
    counter[1] = low1;
    counter[2] = high0 ^ counter[3] ^ key[1];
    counter[3] = low0;
    key[0] += 0x9E3779B97F4A7C15U;
    key[1] += 0xBB67AE8584CAA73BU;
  }
};

// 53 random bits for one position: u = bits / 2^53. numpy counts once before its first number.
DFLOW_HD uint64_t random_bits(DflowDraw const& draw) {
  Philox philox{{1, draw.position, 0, 0}, {draw.seed, draw.sample_index}};
  for (int32_t i = 0; i < 10; ++i) philox.round();
  return philox.counter[0] >> 11;
}

// -- scores in their order --

inline constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffU;
inline constexpr uint32_t kKeyOfInfinity = 0xff800000U;

// Larger scores have larger keys, -0 and 0 the same one; NaN has the largest.
DFLOW_HD uint32_t key_of(float score) {
  if (score != score) return 0xffffffffU;
  uint32_t const bits = float_to_bits(score + 0.0F);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

DFLOW_HD float score_of(uint32_t key) {
  return bits_to_float((key >> 31) != 0 ? key & 0x7fffffffU : ~key);
}

// All scores above a key, and the first `ties` of those that have it.
struct Cut {
  uint32_t key;
  uint64_t ties;
};

template <class T>
struct Row {
  T const* logits;
  int32_t live;

  DFLOW_HD uint32_t key(int32_t id) const { return key_of(widen(logits[id])); }
};

struct Weights {
  double peak;
  double temperature;
  double min_p;
  double scale;

  // exp((score - peak) / temperature) in steps of 1 / scale; 0 below min_p.
  DFLOW_HD uint64_t of(uint32_t key) const {
    double const weight = exp((static_cast<double>(score_of(key)) - peak) / temperature);
    return weight >= min_p ? static_cast<uint64_t>(weight * scale) : 0;
  }
};

// -- what threads share --
//
// A Group has: thread and threads; max(uint32_t) and sum(uint64_t) over its threads, the result given to all;
// before(uint64_t), the sum over the threads before this one; from_owner(owns, value), the value of the one thread that
// owns it; kBins sums with clear_bins() and bin(i), to which any thread may add(bin, amount) until all wait().
// All threads call these together, but for add() and bin().

inline constexpr uint32_t kBins = 256;

// Calls f(id) for every id, neighbouring threads at neighbouring ids.
template <class Group, class F>
DFLOW_HD void for_each(Group const& group, int32_t live, F f) {
  for (int32_t id = group.thread; id < live; id += group.threads) f(id);
}

struct Chunk {
  int32_t first;
  int32_t end;
};

// This thread's ids where their order matters: a run of them, behind those of the thread before.
template <class Group>
DFLOW_HD Chunk chunk_of(Group const& group, int32_t live) {
  int32_t const size = (live + group.threads - 1) / group.threads;
  int32_t const first = group.thread * size < live ? group.thread * size : live;
  return {first, first + size < live ? first + size : live};
}

// What a thread has for one bin, until something comes for another.
struct Held {
  uint32_t bin;
  uint64_t amount;

  template <class Group>
  DFLOW_HD void add(Group& group, uint32_t to, uint64_t more) {
    if (to != bin) {
      group.add(bin, amount);
      *this = Held{to, 0};
    }
    amount += more;
  }
};

struct Reached {
  uint32_t key;
  uint64_t left;  // what is still missing when all above the key is taken
};

// Down the ranking until the amounts that were passed come to `wanted`, which all of them do; eight bits of the key at
// a time. amount(key): of each id. extra: as much again of the key extra.key.
template <class Group, class T, class Amount>
DFLOW_HD Reached reach(Group& group, Row<T> const& row, uint64_t wanted, Cut extra, Amount amount) {
  uint32_t prefix = 0;
  for (int32_t shift = 24; shift >= 0; shift -= 8) {
    auto const inside = [&](uint32_t key) { return shift == 24 || key >> (shift + 8) == prefix; };
    group.clear_bins();
    Held held{0, 0};  // scores are much alike: without it, all threads would add to the same few bins all the time
    for_each(group, row.live, [&](int32_t id) {
      uint32_t const key = row.key(id);
      if (inside(key)) held.add(group, key >> shift & (kBins - 1), amount(key));
    });
    if (group.thread == 0 && inside(extra.key)) held.add(group, extra.key >> shift & (kBins - 1), extra.ties);
    group.add(held.bin, held.amount);
    group.wait();
    uint32_t digit = kBins - 1;
    for (; group.bin(digit) < wanted; --digit) wanted -= group.bin(digit);
    group.wait();  // the bins may be cleared again
    prefix = prefix << 8 | digit;
  }
  return {prefix, wanted};
}

// The `count` largest scores.
template <class Group, class T>
DFLOW_HD Cut top_k(Group& group, Row<T> const& row, uint64_t count) {
  Reached const last = reach(group, row, count, Cut{0, 0}, [](uint32_t) { return uint64_t{1}; });
  return {last.key, last.left};
}

// The steps of weights in which the total of a row stays below 2^62.
template <class Group, class T>
DFLOW_HD double scale_of(Group& group, Row<T> const& row, Cut cut, Weights weights) {
  weights.scale = 4294967296.0;
  uint64_t total = 0;
  for_each(group, row.live, [&](int32_t id) {
    uint32_t const key = row.key(id);
    if (key >= cut.key) total += weights.of(key) + 1;  // rounded up
  });
  total = group.sum(total);
  int32_t exponent = 62 + 32;
  for (; total > 0; total >>= 1) --exponent;
  return static_cast<double>(uint64_t{1} << exponent);
}

// What a cut keeps of its own key, all together.
DFLOW_HD uint64_t weight_of_ties(Cut cut, Weights const& weights) {
  return cut.ties * weights.of(cut.key);
}

template <class Group, class T>
DFLOW_HD uint64_t weight_of(Group& group, Row<T> const& row, Cut cut, Weights const& weights) {
  uint64_t total = 0;
  for_each(group, row.live, [&](int32_t id) {
    uint32_t const key = row.key(id);
    if (key > cut.key) total += weights.of(key);
  });
  return group.sum(total) + weight_of_ties(cut, weights);
}

// The smallest head of the ranking that weighs at least top_p of what the cut leaves.
template <class Group, class T>
DFLOW_HD Cut top_p(Group& group, Row<T> const& row, Cut cut, Weights const& weights, double share) {
  uint64_t const total = weight_of(group, row, cut, weights);
  uint64_t wanted = static_cast<uint64_t>(ceil(share * static_cast<double>(total)));
  wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
  Cut const ties{cut.key, weight_of_ties(cut, weights)};
  auto const amount = [&](uint32_t key) { return key > cut.key ? weights.of(key) : 0; };
  Reached const last = reach(group, row, wanted, ties, amount);
  uint64_t const each = weights.of(last.key);
  return {last.key, (last.left + each - 1) / each};
}

// Weights of ids in their order: of those with the cut's own key, only the first ties are kept.
struct InOrder {
  Cut cut;
  Weights weights;
  uint64_t ties_before;

  DFLOW_HD uint64_t next(uint32_t key) {
    bool const kept = key > cut.key || (key == cut.key && ties_before++ < cut.ties);
    return kept ? weights.of(key) : 0;
  }
};

// The first id at which the weights of what is kept, added up in id order, exceed `bits` / 2^53 of their total.
template <class Group, class T>
DFLOW_HD int64_t invert(Group& group, Row<T> const& row, Cut cut, Weights const& weights, uint64_t bits) {
  Chunk const mine = chunk_of(group, row.live);
  uint64_t ties = 0;
  for (int32_t id = mine.first; id < mine.end; ++id) ties += row.key(id) == cut.key ? 1 : 0;
  InOrder const start{cut, weights, group.before(ties)};
  uint64_t sum = 0;
  InOrder adding = start;
  for (int32_t id = mine.first; id < mine.end; ++id) sum += adding.next(row.key(id));
  uint64_t passed = group.before(sum);
  uint64_t const limit = high_product(bits << 11, group.sum(sum));
  bool const owns = passed <= limit && limit - passed < sum;
  int32_t id = mine.first;
  InOrder walking = start;
  while (owns && (passed += walking.next(row.key(id))) <= limit) ++id;
  return static_cast<int64_t>(group.from_owner(owns, static_cast<uint64_t>(id)));
}

// The token, or -1 where the largest logit is not finite.
template <class Group, class T>
DFLOW_HD int64_t draw_token(Group& group, Row<T> const& row, DflowDraw const& draw) {
  uint32_t peak = 0;
  for_each(group, row.live, [&](int32_t id) { peak = row.key(id) > peak ? row.key(id) : peak; });
  peak = group.max(peak);
  if (peak <= kKeyOfMinusInfinity || peak >= kKeyOfInfinity) return -1;
  Cut cut{0, 0};
  if (draw.top_k > 0 && draw.top_k < row.live) cut = top_k(group, row, static_cast<uint64_t>(draw.top_k));
  Weights weights{static_cast<double>(score_of(peak)), draw.temperature, draw.min_p, 1.0};
  weights.scale = scale_of(group, row, cut, weights);
  if (draw.top_p < 1.0) cut = top_p(group, row, cut, weights, draw.top_p);
  return invert(group, row, cut, weights, random_bits(draw));
}

}  // namespace dflow
