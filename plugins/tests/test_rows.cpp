// The arithmetic of one row, and the geometry of a team, compiled for the CPU.
#include <cmath>
#include <vector>

#include "check.h"
#include "host_rows.h"
#include "kernel_cases.h"

namespace dflow::testing {
namespace {

std::vector<int32_t> const kSizes = {1, 2, 3, 7, 8, 9, 31, 64, 127, 1000, 2048, 2560, 4096, 5120, 8191, 8192};

// Vector access where a row is made of whole packs, scalar access always.
template <class T>
void inject_and_check(InjectCase const& c) {
  InjectCall<T> scalar(c);
  relay_inject_on_host<Access::kScalar, T>(scalar.args());
  scalar.check();
  if (c.columns % Pack<T>::kWidth != 0) return;
  InjectCall<T> vector(c);
  relay_inject_on_host<Access::kVector, T>(vector.args());
  vector.check();
}

TEST(relayed_rows_match_float64_for_every_format_and_size) {
  for_each_format([](auto number) {
    for (int32_t columns : kSizes) inject_and_check<decltype(number)>({4, columns});
  });
}

TEST(relayed_rows_are_right_at_extreme_magnitudes) {
  for_each_format([](auto number) {
    using T = decltype(number);
    for (Numbers h : {Numbers{0.0, 3e4}, Numbers{3e4, 1.0}, Numbers{-3e4, 300.0}, Numbers{3e4, 0.0}, Numbers{0.0, 1e-4},
                      Numbers{0.0, 0.0}}) {
      if (std::is_same_v<T, Half> && h.spread == 3e4) h.spread = 1e4;  // stay within the format
      inject_and_check<T>({4, 2048, h, {0.0, 3e4 / (std::is_same_v<T, Half> ? 8 : 1)}});
      inject_and_check<T>({4, 2051, h});
    }
  });
}

TEST(one_outlier_of_30000_does_not_spoil_a_row) {
  for_each_format([](auto number) {
    using T = decltype(number);
    InjectCall<T> call({4, 4096});
    call.h()[5] = narrow<T>(3e4F);
    call.h()[2 * 4096 + 4095] = narrow<T>(-3e4F);
    relay_inject_on_host<Access::kVector, T>(call.args());
    call.check();
  });
}

TEST(nothing_outside_the_tensors_is_touched) {
  for (Edge edge : {Edge::kFront, Edge::kBack}) {
    for (int32_t columns : {5, 13, 64, 1027}) {
      for_each_format([&](auto number) {
        InjectCase c{4, columns};
        c.edge = edge;
        inject_and_check<decltype(number)>(c);
      });
    }
  }
}

template <class Bits>
void extract_and_check(ExtractCase const& c) {
  ExtractCall<Bits> scalar(c);
  hidden_state_extract_on_host<Access::kScalar, Bits>(scalar.args());
  scalar.check();
  if (c.columns % Pack<Bits>::kWidth != 0) return;
  ExtractCall<Bits> vector(c);
  hidden_state_extract_on_host<Access::kVector, Bits>(vector.args());
  vector.check();
}

TEST(extracted_rows_are_packed_and_zero_filled_for_every_size) {
  for (int32_t columns : kSizes) {
    extract_and_check<uint16_t>({{3, 0, 5}, 5, 3, columns});
    extract_and_check<uint32_t>({{3, 0, 5}, 5, 3, columns});
  }
  extract_and_check<uint32_t>({{2}, 3, 2, 20011});  // more than a team holds at once
}

TEST(row_counts_out_of_range_are_clipped) {
  extract_and_check<uint16_t>({{-3, 99, 5}, 5, 2, 24});
}

// Each column of a row must belong to one thread and one pack, and none may lie beyond the row.
template <class T>
void check_coverage(int32_t columns) {
  int32_t const threads = team_threads(int64_t{columns} * int64_t{sizeof(T)});
  std::vector<int> owners(columns);
  int32_t const rounds = (columns / Pack<T>::kWidth + 1) / threads + 1;
  for (int32_t t = 0; t < threads; ++t) {
    for (int32_t pack = 0; pack < rounds; ++pack) {
      Span const span = span_of<T>(Team{threads, t}, pack, columns);
      CHECK(span.live >= 0 && span.live <= Pack<T>::kWidth, "live ", span.live);
      for (int32_t i = 0; i < span.live; ++i) ++owners.at(span.first + i);
    }
  }
  for (int32_t i = 0; i < columns; ++i)
    CHECK(owners[i] == 1, "column ", i, " of ", columns, ": ", owners[i], " owners");
}

TEST(every_column_has_one_owner) {
  for (int32_t columns = 1; columns < 3000; columns += columns < 80 ? 1 : 61) {
    check_coverage<float>(columns);
    check_coverage<Half>(columns);
  }
  for (int32_t columns : kSizes) check_coverage<float>(columns);
}

TEST(a_team_holds_a_whole_row_where_it_must) {
  for (int32_t columns = 1; columns <= kMaxInjectColumns; ++columns) {
    int32_t const threads = team_threads(int64_t{columns} * 4);
    CHECK(threads % kWarp == 0 && threads >= kWarp && threads <= kMaxThreads, threads, " threads");
    CHECK(threads * kPacksPerThread * Pack<float>::kWidth >= columns, threads, " threads for ", columns, " columns");
  }
}

template <class T>
int64_t offset(T const* address, void const* base) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base));
}

// Only addresses are computed here; nothing lies there.
TEST(offsets_beyond_32_bits_are_right) {
  auto* const base = reinterpret_cast<float*>(uintptr_t{1} << 40);
  int64_t const row = (int64_t{1} << 33) + 7;
  RelayInjectArgs const inject{base, base, base, base, base, nullptr, base, row + 1, 5120, 1e-6F};
  InjectRow<float> const relay = inject_row<float>(inject, row);
  CHECK(offset(relay.h, base) == row * 5120 * 4 && offset(relay.relayed, base) == row * 5120 * 4, "h, relayed");
  CHECK(offset(relay.gamma, base) == (row * 2 + 1) * 5120 * 4, "gamma at ", offset(relay.gamma, base));

  int64_t const row_count = 1 << 30;
  HiddenStateExtractArgs const args{{base, base, base}, &row_count, base, 1, row + 1, 3, 4096};
  ExtractRow<uint32_t> const part = extract_row<uint32_t>(args, row, 2);
  CHECK(offset(part.source, base) == row * 4096 * 4, "source at ", offset(part.source, base));
  CHECK(offset(part.target, base) == (row * 3 + 2) * 4096 * 4 && !part.live, "target at ", offset(part.target, base));
}

}  // namespace
}  // namespace dflow::testing
