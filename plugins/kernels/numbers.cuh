// The number formats of the kernels: kept as bits, computed in float32.
//
// This compiles for the GPU, where a conversion is one instruction, and for any C++17 compiler, where it is spelled
// out: so the tests run the kernels' arithmetic on a machine without CUDA. Both round to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DFLOW_HD __host__ __device__ __forceinline__
#else
#define DFLOW_HD inline
#endif

namespace dflow {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

DFLOW_HD float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

DFLOW_HD uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

namespace portable {

// Exponent and mantissa move into place; scaling by 2^112 corrects the exponent's bias, and normalises subnormals.
inline float widen(Half value) {
  uint32_t const sign = uint32_t{value.bits} >> 15 << 31;
  uint32_t const magnitude = value.bits & 0x7fffU;
  bool const finite = magnitude < 0x7c00U;
  uint32_t const moved = magnitude << 13;
  uint32_t const wide = finite ? float_to_bits(bits_to_float(moved) * 0x1p112F) : moved | 0x7f800000U;
  return bits_to_float(sign | wide);
}

inline Half narrow_to_half(float value) {
  uint32_t const bits = float_to_bits(value);
  uint32_t const sign = bits >> 31 << 15;
  uint32_t const magnitude = bits & 0x7fffffffU;
  uint32_t narrow;
  if (magnitude > 0x7f800000U) {
    narrow = 0x7fffU;  // NaN
  } else if (magnitude >= 0x477ff000U) {
    narrow = 0x7c00U;  // 65520, halfway above the largest half, and everything beyond: infinity
  } else if (magnitude < 0x38800000U) {
    // Below 2^-14 the result is subnormal, a multiple of 2^-24. That is the spacing of floats at 1/2: adding rounds.
    narrow = float_to_bits(bits_to_float(magnitude) + 0.5F) - float_to_bits(0.5F);
  } else {
    uint32_t const ties_to_even = 0xfffU + ((magnitude >> 13) & 1U);
    narrow = (magnitude - (112U << 23) + ties_to_even) >> 13;
  }
  return Half{static_cast<uint16_t>(sign | narrow)};
}

inline BFloat16 narrow_to_bfloat16(float value) {
  uint32_t const bits = float_to_bits(value);
  bool const nan = (bits & 0x7fffffffU) > 0x7f800000U;
  uint32_t const ties_to_even = 0x7fffU + ((bits >> 16) & 1U);
  return BFloat16{static_cast<uint16_t>(nan ? 0x7fffU : (bits + ties_to_even) >> 16)};
}

}  // namespace portable

// The value of a stored number.
DFLOW_HD float widen(float value) {
  return value;
}

DFLOW_HD float widen(BFloat16 value) {
  return bits_to_float(uint32_t{value.bits} << 16);
}

DFLOW_HD float widen(Half value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  return portable::widen(value);
#endif
}

// The stored number nearest to a value.
template <class T>
DFLOW_HD T narrow(float value);

template <>
DFLOW_HD float narrow<float>(float value) {
  return value;
}

template <>
DFLOW_HD Half narrow<Half>(float value) {
#ifdef __CUDA_ARCH__
  return Half{__half_as_ushort(__float2half_rn(value))};
#else
  return portable::narrow_to_half(value);
#endif
}

template <>
DFLOW_HD BFloat16 narrow<BFloat16>(float value) {
#ifdef __CUDA_ARCH__
  return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  return portable::narrow_to_bfloat16(value);
#endif
}

}  // namespace dflow
