// What the kernels must give, in float64 and as plainly as it can be said.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "../kernels/numbers.cuh"

namespace dflow::testing {

template <class T>
struct Format;  // relative distance of neighbouring values, and the smallest distance there is

template <>
struct Format<float> {
  static constexpr char const* kName = "float32";
  static constexpr double kSpacing = 0x1p-23, kSmallest = 0x1p-149;
};

template <>
struct Format<Half> {
  static constexpr char const* kName = "float16";
  static constexpr double kSpacing = 0x1p-10, kSmallest = 0x1p-24;
};

template <>
struct Format<BFloat16> {
  static constexpr char const* kName = "bfloat16";
  static constexpr double kSpacing = 0x1p-7, kSmallest = 0x1p-133;
};

// A value and how far from it a correct float32 computation, rounded to T, may lie.
struct Expected {
  double value;
  double tolerance;
};

struct RowInputs {
  std::vector<double> x, h, beta, gamma, weight, bias;
  double epsilon;
};

template <class T>
std::vector<Expected> relayed_row(RowInputs const& in) {
  double const count = static_cast<double>(in.h.size());
  double mean = 0.0;
  double variance = 0.0;
  for (double h : in.h) mean += h / count;
  for (double h : in.h) variance += (h - mean) * (h - mean) / count;
  std::vector<Expected> row;
  for (size_t i = 0; i < in.h.size(); ++i) {
    double const scaled = (in.h[i] - mean) / std::sqrt(variance + in.epsilon) * in.weight[i];
    double const value = in.x[i] + in.beta[i] * (scaled + in.bias[i]) + in.gamma[i];
    double const terms = std::abs(in.x[i]) + std::abs(in.gamma[i]) +
                         std::abs(in.beta[i]) * (std::abs(scaled) + std::abs(in.weight[i]) + std::abs(in.bias[i]));
    double const rounding = Format<T>::kSpacing / 2 * std::abs(value) + Format<T>::kSmallest;
    row.push_back({value, rounding + 8 * Format<float>::kSpacing * terms});
  }
  return row;
}

}  // namespace dflow::testing
