// How rows are dealt out: a block is a team, a team works on one row at a time, and thread t of it owns the row's packs
// t, t + threads, t + 2 threads, ... so that neighbouring threads touch neighbouring packs.
#pragma once

#include "pack.cuh"

namespace dflow {

inline constexpr int32_t kWarp = 32;
inline constexpr int32_t kMaxThreads = 512;
inline constexpr int32_t kPacksPerThread = 4;  // held at once: that many 16-byte loads are in flight

struct Team {
  int32_t threads;
  int32_t thread;  // this one
};

// A run of columns that one thread owns; live is 0 beyond the end of the row.
struct Span {
  int32_t first;
  int32_t live;
};

template <class T>
DFLOW_HD Span span_of(Team team, int32_t pack, int32_t columns) {
  constexpr int32_t width = Pack<T>::kWidth;
  int32_t const first = (pack * team.threads + team.thread) * width;
  int32_t const left = columns - first;
  return Span{first, left < 0 ? 0 : left < width ? left : width};
}

// Threads for rows of so many bytes: whole warps, enough to hold a row at once where that is possible.
inline int32_t team_threads(int64_t row_bytes) {
  constexpr int64_t kBytesPerWarp = kWarp * kPacksPerThread * 16;
  int64_t const warps = (row_bytes + kBytesPerWarp - 1) / kBytesPerWarp;
  return static_cast<int32_t>(warps * kWarp < kMaxThreads ? warps * kWarp : kMaxThreads);
}

// Copies a row of any length; the loads of a thread are all in flight before its first store.
template <Access kAccess, class T>
DFLOW_HD void copy_row(Team team, T const* source, T* target, int32_t columns) {
  for (int32_t first = 0; span_of<T>({team.threads, 0}, first, columns).live > 0; first += kPacksPerThread) {
    Pack<T> packs[kPacksPerThread];
#pragma unroll
    for (int32_t i = 0; i < kPacksPerThread; ++i) {
      Span const span = span_of<T>(team, first + i, columns);
      packs[i] = load_pack<kAccess>(source + span.first, span.live);
    }
#pragma unroll
    for (int32_t i = 0; i < kPacksPerThread; ++i) {
      Span const span = span_of<T>(team, first + i, columns);
      store_pack<kAccess>(target + span.first, packs[i], span.live);
    }
  }
}

template <Access kAccess, class T>
DFLOW_HD void zero_row(Team team, T* target, int32_t columns) {
  for (int32_t i = 0; span_of<T>({team.threads, 0}, i, columns).live > 0; ++i) {
    Span const span = span_of<T>(team, i, columns);
    store_pack<kAccess>(target + span.first, Pack<T>{}, span.live);
  }
}

}  // namespace dflow
