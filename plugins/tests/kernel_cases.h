// Inputs for the kernels' tests, in guarded memory, with poison where nothing may read.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "../kernels/kernels.h"
#include "check.h"
#include "guarded.h"
#include "reference.h"

namespace dflow::testing {

template <class T>
inline constexpr DType kDType = DType::kFloat32;
template <>
inline constexpr DType kDType<Half> = DType::kFloat16;
template <>
inline constexpr DType kDType<BFloat16> = DType::kBFloat16;

// Calls body(T{}) for every number format.
template <class Body>
void for_each_format(Body body) {
  body(float{});
  body(Half{});
  body(BFloat16{});
}

template <class T>
T poison() {
  return narrow<T>(std::numeric_limits<float>::quiet_NaN());
}

struct Numbers {
  double centre = 0.0;
  double spread = 1.0;
};

template <class T>
void fill(Guarded<T>& buffer, Numbers numbers, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (T& value : buffer) value = narrow<T>(static_cast<float>(numbers.centre + numbers.spread * normal(random)));
}

struct InjectCase {
  int64_t rows = 4;
  int32_t columns = 64;
  Numbers h;
  Numbers x;
  float epsilon = 1e-6F;
  Edge edge = Edge::kBack;
  std::vector<int> on = {1, 0, 1, 1};  // repeated over the rows
};

// A call of RelayInject and its memory. h and beta_gamma are poisoned in rows that are off.
template <class T>
class InjectCall {
 public:
  explicit InjectCall(InjectCase const& c)
      : case_(c),
        x_(c.rows * c.columns, c.edge),
        h_(c.rows * c.columns, c.edge),
        beta_gamma_(2 * c.rows * c.columns, c.edge),
        weight_(c.columns, c.edge),
        bias_(c.columns, c.edge),
        relayed_(c.rows * c.columns, c.edge),
        on_(c.rows) {
    fill(x_, c.x, 1);
    fill(h_, c.h, 2);
    fill(beta_gamma_, {0.0, 1.0}, 3);
    fill(weight_, {1.0, 0.3}, 4);
    fill(bias_, {0.0, 0.3}, 5);
    std::fill(relayed_.begin(), relayed_.end(), poison<T>());
    for (int64_t row = 0; row < c.rows; ++row) set_row(row, c.on[row % c.on.size()]);
  }

  RelayInjectArgs args() {
    return {x_.data(),  h_.data(),       beta_gamma_.data(), weight_.data(), bias_.data(),
            on_.data(), relayed_.data(), case_.rows,         case_.columns,  case_.epsilon};
  }

  Guarded<T>& h() { return h_; }
  Guarded<T>& beta_gamma() { return beta_gamma_; }
  Guarded<T>& relayed() { return relayed_; }

  void check() {
    for (int64_t row = 0; row < case_.rows; ++row) {
      if (on_[row] != 0) {
        check_relayed(row);
      } else {
        int64_t const first = row * case_.columns;
        bool const copied = std::memcmp(&relayed_[first], &x_[first], case_.columns * sizeof(T)) == 0;
        CHECK(copied, Format<T>::kName, " row ", row, " is off but not x to the bit");
      }
    }
  }

 private:
  void set_row(int64_t row, int on) {
    on_[row] = on;
    if (on != 0) return;
    int64_t const first = row * case_.columns;
    std::fill_n(&h_[first], case_.columns, poison<T>());
    std::fill_n(&beta_gamma_[2 * first], 2 * case_.columns, poison<T>());
  }

  std::vector<double> wide(T const* values) const {
    std::vector<double> wide(case_.columns);
    std::transform(values, values + case_.columns, wide.begin(), [](T value) { return widen(value); });
    return wide;
  }

  void check_relayed(int64_t row) {
    int64_t const first = row * case_.columns;
    RowInputs const in{wide(&x_[first]),
                       wide(&h_[first]),
                       wide(&beta_gamma_[2 * first]),
                       wide(&beta_gamma_[2 * first + case_.columns]),
                       wide(weight_.data()),
                       wide(bias_.data()),
                       case_.epsilon};
    std::vector<Expected> const expected = relayed_row<T>(in);
    for (int32_t i = 0; i < case_.columns; ++i) {
      double const got = widen(relayed_[first + i]);
      CHECK(std::abs(got - expected[i].value) <= expected[i].tolerance, Format<T>::kName, " row ", row, " of ",
            case_.columns, ", column ", i, ": got ", got, ", expected ", expected[i].value, " +- ",
            expected[i].tolerance);
    }
  }

  InjectCase case_;
  Guarded<T> x_, h_, beta_gamma_, weight_, bias_, relayed_;
  Guarded<int64_t> on_;
};

struct ExtractCase {
  std::vector<int64_t> row_count = {3, 0, 5};
  int64_t rows = 5;
  int32_t num_taps = 3;
  int32_t columns = 64;
  Edge edge = Edge::kBack;
};

// A call of HiddenStateExtract. Every value is its own number, and rows from row_count on are poison.
template <class Bits>
class ExtractCall {
 public:
  explicit ExtractCall(ExtractCase const& c)
      : case_(c), hidden_(batch() * c.rows * c.num_taps * c.columns, c.edge), row_count_(batch()) {
    std::copy(c.row_count.begin(), c.row_count.end(), row_count_.begin());
    std::fill(hidden_.begin(), hidden_.end(), static_cast<Bits>(~Bits{0}));
    for (int32_t tap = 0; tap < c.num_taps; ++tap) {
      taps_.push_back(std::make_unique<Guarded<Bits>>(batch() * c.rows * c.columns, c.edge));
      for (int64_t i = 0; i < taps_[tap]->size(); ++i)
        (*taps_[tap])[i] = live(i / c.columns) ? number(tap, i) : ~Bits{0};
    }
  }

  HiddenStateExtractArgs args() {
    HiddenStateExtractArgs args{{},         row_count_.data(), hidden_.data(), batch(),
                                case_.rows, case_.num_taps,    case_.columns};
    for (size_t tap = 0; tap < taps_.size(); ++tap) args.taps[tap] = taps_[tap]->data();
    return args;
  }

  Guarded<Bits>& tap(int32_t tap) { return *taps_[tap]; }
  Guarded<Bits>& hidden() { return hidden_; }

  void check() {
    int64_t const width = int64_t{case_.num_taps} * case_.columns;
    for (int64_t i = 0; i < hidden_.size(); ++i) {
      int64_t const row = i / width;
      int32_t const tap = static_cast<int32_t>(i % width / case_.columns);
      Bits const expected = live(row) ? number(tap, row * case_.columns + i % case_.columns) : Bits{0};
      CHECK(hidden_[i] == expected, 8 * sizeof(Bits), " bits, row ", row, ", tap ", tap, ", column ", i % case_.columns,
            " of ", case_.columns, ": got ", hidden_[i], ", expected ", expected);
    }
  }

 private:
  int64_t batch() const { return static_cast<int64_t>(case_.row_count.size()); }
  bool live(int64_t row) const { return row % case_.rows < case_.row_count[row / case_.rows]; }
  static Bits number(int32_t tap, int64_t i) { return static_cast<Bits>(i * 31 + tap * 7919 + 1); }

  ExtractCase case_;
  std::vector<std::unique_ptr<Guarded<Bits>>> taps_;
  Guarded<Bits> hidden_;
  Guarded<int64_t> row_count_;
};

}  // namespace dflow::testing
