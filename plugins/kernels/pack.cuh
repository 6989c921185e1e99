// Sixteen bytes of a row: what one thread moves with one instruction.
#pragma once

#include "numbers.cuh"

namespace dflow {

// How rows are accessed. Rows that all begin on 16-byte boundaries are multiples of sixteen bytes, without a tail, and
// go in whole packs. Any other rows go a value at a time, tail included.
enum class Access { kVector, kScalar };

// Values as 32-bit words, the registers they live in; two 16-bit values share one, the first in its lower half.
template <class T>
struct __attribute__((aligned(16), may_alias)) Pack {
  static constexpr int32_t kWidth = 16 / sizeof(T);
  static constexpr int32_t kPerWord = 4 / sizeof(T);
  uint32_t words[4];

  DFLOW_HD T get(int32_t i) const {
    uint32_t const word = words[i / kPerWord] >> (8 * sizeof(T) * (i % kPerWord));
    T value;
    memcpy(&value, &word, sizeof(value));  // little-endian, as are all GPUs and their hosts
    return value;
  }

  // Only into a place that holds zero.
  DFLOW_HD void put(int32_t i, T value) {
    uint32_t word = 0;
    memcpy(&word, &value, sizeof(value));
    words[i / kPerWord] |= word << (8 * sizeof(T) * (i % kPerWord));
  }
};

template <class T>
DFLOW_HD void store_whole(T* target, Pack<T> const& pack) {
#ifdef __CUDA_ARCH__
  // A plain assignment becomes four stores where the pack was itself just loaded.
  uint32_t const* const words = pack.words;
  __stwb(reinterpret_cast<uint4*>(target), make_uint4(words[0], words[1], words[2], words[3]));
#else
  *reinterpret_cast<Pack<T>*>(target) = pack;
#endif
}

// The first `live` values at `source`, then zeros. Nothing else is read. With vector access all are live, or none.
template <Access kAccess, class T>
DFLOW_HD Pack<T> load_pack(T const* source, int32_t live) {
  Pack<T> pack{};
  if constexpr (kAccess == Access::kVector) {
    if (live > 0) pack = *reinterpret_cast<Pack<T> const*>(source);
  } else {
#pragma unroll
    for (int32_t i = 0; i < Pack<T>::kWidth; ++i) {
      if (i < live) pack.put(i, source[i]);
    }
  }
  return pack;
}

// Writes the first `live` values, and nothing else.
template <Access kAccess, class T>
DFLOW_HD void store_pack(T* target, Pack<T> const& pack, int32_t live) {
  if constexpr (kAccess == Access::kVector) {
    if (live > 0) store_whole(target, pack);
  } else {
#pragma unroll
    for (int32_t i = 0; i < Pack<T>::kWidth; ++i) {
      if (i < live) target[i] = pack.get(i);
    }
  }
}

}  // namespace dflow
