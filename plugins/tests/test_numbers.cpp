// The conversions of the kernels against their definitions.
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "check.h"
#include "reference.h"

namespace dflow::testing {
namespace {

// The value of a stored number from sign, exponent and mantissa, by arithmetic alone.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  uint32_t const mantissa = bits & ((1U << mantissa_bits) - 1);
  int const exponent = static_cast<int>(bits >> mantissa_bits & ((1U << exponent_bits) - 1));
  double const sign = bits >> (exponent_bits + mantissa_bits) != 0 ? -1.0 : 1.0;
  int const bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == 2 * bias + 1) return mantissa == 0 ? sign * HUGE_VAL : NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1U << mantissa_bits), exponent - bias - mantissa_bits);
}

double value_of(Half half) {
  return value_of(half.bits, 5, 10);
}
double value_of(BFloat16 number) {
  return value_of(number.bits, 8, 7);
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

template <class T>
void check_every_stored_number() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    T const number{static_cast<uint16_t>(bits)};
    double const wide = widen(number);
    CHECK(same(wide, value_of(number)), Format<T>::kName, " bits ", bits, " widened to ", wide);
    T const back = narrow<T>(static_cast<float>(wide));
    CHECK(same(value_of(back), value_of(number)), Format<T>::kName, " bits ", bits, " came back as ", back.bits);
  }
}

// `narrowed` must be the nearest of itself and its neighbours, the even one if two are as near.
template <class T>
void check_nearest(float value) {
  T const narrowed = narrow<T>(value);
  double const distance = std::abs(value_of(narrowed) - value);
  for (int step : {-1, 1}) {
    T const other{static_cast<uint16_t>(narrowed.bits + step)};
    double const theirs = std::abs(value_of(other) - value);
    bool const tie = theirs == distance && narrowed.bits % 2 == 1;
    CHECK(!(theirs < distance) && !tie, Format<T>::kName, " of ", value, " is ", value_of(narrowed), ", nearer is ",
          value_of(other));
  }
}

template <class T>
void check_rounding(float largest) {
  std::mt19937 random(7);
  std::uniform_int_distribution<uint32_t> any;
  for (int i = 0; i < 200000; ++i) {
    float const value = bits_to_float(any(random));
    if (std::abs(value) < largest) check_nearest<T>(value);
  }
  for (uint32_t bits = 1; bits < 0x7000; bits += 3) {  // halfway between neighbours
    double const middle = (value_of(T{static_cast<uint16_t>(bits)}) + value_of(T{static_cast<uint16_t>(bits + 1)})) / 2;
    if (middle < largest) check_nearest<T>(static_cast<float>(middle));
  }
}

TEST(every_half_survives_widening_and_narrowing) {
  check_every_stored_number<Half>();
}
TEST(every_bfloat16_survives_widening_and_narrowing) {
  check_every_stored_number<BFloat16>();
}
TEST(half_rounds_to_nearest_even) {
  check_rounding<Half>(65504.0F);
}
TEST(bfloat16_rounds_to_nearest_even) {
  check_rounding<BFloat16>(3.3e38F);
}

TEST(values_beyond_a_format_become_infinite) {
  CHECK(narrow<Half>(65519.99F).bits == 0x7bff, "largest half");
  CHECK(narrow<Half>(65520.0F).bits == 0x7c00 && narrow<Half>(-1e30F).bits == 0xfc00, "halves");
  CHECK(narrow<BFloat16>(std::numeric_limits<float>::max()).bits == 0x7f80, "bfloat16");
}

}  // namespace
}  // namespace dflow::testing
