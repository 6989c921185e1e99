// The row functions of the kernels, driven on one CPU thread: the threads of a team in turn, sums in the order of the
// GPU's shuffles. What the GPU gives should equal this to the bit.
#pragma once

#include <vector>

#include "../kernels/hidden_state_extract.cuh"
#include "../kernels/relay_inject.cuh"

namespace dflow::testing {

// Neighbours at distance 16, 8, 4, 2, 1 are added, as a warp's shuffles do.
template <class V>
V warp_sum(std::vector<V> lanes) {
  for (size_t distance = kWarp / 2; distance > 0; distance /= 2) {
    std::vector<V> const before = lanes;
    for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = before[i] + before[i ^ distance];
  }
  return lanes[0];
}

template <class V>
V team_sum(std::vector<V> const& threads) {
  std::vector<V> warps(kWarp, V{});
  for (size_t first = 0; first < threads.size(); first += kWarp) {
    warps[first / kWarp] = warp_sum(std::vector<V>(threads.begin() + first, threads.begin() + first + kWarp));
  }
  return warp_sum(warps);
}

template <Access kAccess, class T>
void inject_on_host(int32_t threads, InjectRow<T> const& row, float epsilon) {
  std::vector<Part<T>> parts;
  std::vector<float> sums;
  std::vector<Deviations> deviations;
  for (int32_t t = 0; t < threads; ++t) parts.push_back(load_part<kAccess>({threads, t}, row.h, row.columns));
  for (Part<T> const& part : parts) sums.push_back(sum_of(part));
  float const mean = team_sum(sums) / static_cast<float>(row.columns);
  for (int32_t t = 0; t < threads; ++t) {
    deviations.push_back(deviations_of(Team{threads, t}, parts[t], row.columns, mean));
  }
  Norm const norm = norm_of(mean, team_sum(deviations), row.columns, epsilon);
  for (int32_t t = 0; t < threads; ++t) store_part<kAccess>({threads, t}, parts[t], row, norm);
}

template <Access kAccess, class T>
void relay_inject_on_host(RelayInjectArgs const& args) {
  int32_t const threads = team_threads(int64_t{args.columns} * int64_t{sizeof(T)});
  for (int64_t i = 0; i < args.rows; ++i) {
    InjectRow<T> const row = inject_row<T>(args, i);
    if (args.relay_on[i] != 0) {
      inject_on_host<kAccess>(threads, row, args.epsilon);
    } else {
      for (int32_t t = 0; t < threads; ++t) copy_row<kAccess>({threads, t}, row.x, row.relayed, row.columns);
    }
  }
}

template <Access kAccess, class Bits>
void hidden_state_extract_on_host(HiddenStateExtractArgs const& args) {
  int32_t const threads = team_threads(int64_t{args.columns} * int64_t{sizeof(Bits)});
  for (int64_t row = 0; row < args.batch * args.rows; ++row) {
    for (int32_t tap = 0; tap < args.num_taps; ++tap) {
      ExtractRow<Bits> const part = extract_row<Bits>(args, row, tap);
      for (int32_t t = 0; t < threads; ++t) extract<kAccess>({threads, t}, part, args.columns);
    }
  }
}

}  // namespace dflow::testing
