// One row of RelayInject: relayed = x + beta * LayerNorm(h) + gamma, in float32.
//
// A thread keeps its part of h in registers, so that every tensor is read once. The moments are those of the corrected
// two-pass algorithm: the sum gives a mean; the deviations from it give the variance, and their own sum, which would be
// zero in exact arithmetic, corrects both. So a row of 30000 +- 1 is normalised as well as one of 0 +- 1.
#pragma once

#include <cmath>

#include "kernels.h"
#include "team.cuh"

namespace dflow {

template <class T>
struct InjectRow {
  T const* x;
  T const* h;
  T const* beta;
  T const* gamma;
  T const* norm_weight;
  T const* norm_bias;
  T* relayed;
  int32_t columns;
};

template <class T>
DFLOW_HD InjectRow<T> inject_row(RelayInjectArgs const& args, int64_t row) {
  int64_t const offset = row * args.columns;
  T const* const beta = static_cast<T const*>(args.beta_gamma) + 2 * offset;
  return {static_cast<T const*>(args.x) + offset,
          static_cast<T const*>(args.h) + offset,
          beta,
          beta + args.columns,
          static_cast<T const*>(args.norm_weight),
          static_cast<T const*>(args.norm_bias),
          static_cast<T*>(args.relayed) + offset,
          args.columns};
}

// What one thread holds of h.
template <class T>
struct Part {
  Pack<T> packs[kPacksPerThread];
};

template <Access kAccess, class T>
DFLOW_HD Part<T> load_part(Team team, T const* h, int32_t columns) {
  Part<T> part;
#pragma unroll
  for (int32_t i = 0; i < kPacksPerThread; ++i) {
    Span const span = span_of<T>(team, i, columns);
    part.packs[i] = load_pack<kAccess>(h + span.first, span.live);
  }
  return part;
}

// The zeros beyond the end of the row add nothing.
template <class T>
DFLOW_HD float sum_of(Part<T> const& part) {
  float sum = 0.0F;
#pragma unroll
  for (int32_t i = 0; i < kPacksPerThread; ++i) {
#pragma unroll
    for (int32_t j = 0; j < Pack<T>::kWidth; ++j) sum += widen(part.packs[i].get(j));
  }
  return sum;
}

// Sums of deviations from a mean, and of their squares.
struct Deviations {
  float sum;
  float squares;
};

DFLOW_HD Deviations operator+(Deviations a, Deviations b) {
  return {a.sum + b.sum, a.squares + b.squares};
}

template <class T>
DFLOW_HD Deviations deviations_of(Team team, Part<T> const& part, int32_t columns, float mean) {
  Deviations deviations{};
#pragma unroll
  for (int32_t i = 0; i < kPacksPerThread; ++i) {
    int32_t const live = span_of<T>(team, i, columns).live;
#pragma unroll
    for (int32_t j = 0; j < Pack<T>::kWidth; ++j) {
      float const deviation = j < live ? widen(part.packs[i].get(j)) - mean : 0.0F;
      deviations.sum += deviation;
      deviations.squares = fmaf(deviation, deviation, deviations.squares);
    }
  }
  return deviations;
}

struct Norm {
  float mean;
  float correction;  // of the mean; apart, because their sum would be rounded to the mean again
  float scale;       // 1 / standard deviation
};

DFLOW_HD Norm norm_of(float mean, Deviations deviations, int32_t columns, float epsilon) {
  float const count = static_cast<float>(columns);
  float const correction = deviations.sum / count;
  float const variance = fmaf(-correction, deviations.sum, deviations.squares) / count;
  return {mean, correction, 1.0F / sqrtf(fmaxf(variance, 0.0F) + epsilon)};
}

template <class T>
DFLOW_HD T relayed_value(T x, T h, T beta, T gamma, T weight, T bias, Norm norm) {
  float const unit = ((widen(h) - norm.mean) - norm.correction) * norm.scale;
  float const normed = fmaf(unit, widen(weight), widen(bias));
  return narrow<T>(widen(x) + fmaf(widen(beta), normed, widen(gamma)));
}

template <Access kAccess, class T>
DFLOW_HD void store_part(Team team, Part<T> const& part, InjectRow<T> const& row, Norm norm) {
#pragma unroll
  for (int32_t i = 0; i < kPacksPerThread; ++i) {
    auto const [first, live] = span_of<T>(team, i, row.columns);
    Pack<T> const x = load_pack<kAccess>(row.x + first, live);
    Pack<T> const beta = load_pack<kAccess>(row.beta + first, live);
    Pack<T> const gamma = load_pack<kAccess>(row.gamma + first, live);
    Pack<T> const weight = load_pack<kAccess>(row.norm_weight + first, live);
    Pack<T> const bias = load_pack<kAccess>(row.norm_bias + first, live);
    Pack<T> relayed{};
#pragma unroll
    for (int32_t j = 0; j < Pack<T>::kWidth; ++j) {
      relayed.put(j, relayed_value(x.get(j), part.packs[i].get(j), beta.get(j), gamma.get(j), weight.get(j),
                                   bias.get(j), norm));
    }
    store_pack<kAccess>(row.relayed + first, relayed, live);
  }
}

}  // namespace dflow
