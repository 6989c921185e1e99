#include <algorithm>

#include "launch.h"
#include "relay_inject.cuh"

namespace dflow {
namespace {

__device__ __forceinline__ float exchange(float value, int32_t lanes) {
  return __shfl_xor_sync(0xffffffffU, value, lanes);
}

__device__ __forceinline__ Deviations exchange(Deviations value, int32_t lanes) {
  return {exchange(value.sum, lanes), exchange(value.squares, lanes)};
}

template <class V>
__device__ __forceinline__ V warp_sum(V value) {
#pragma unroll
  for (int32_t lanes = kWarp / 2; lanes > 0; lanes /= 2) value = value + exchange(value, lanes);
  return value;
}

// The sum over the team, given to every thread of it.
template <class V>
__device__ __forceinline__ V team_sum(Team team, V value) {
  __shared__ V of_warp[kMaxThreads / kWarp];
  int32_t const lane = team.thread % kWarp;
  value = warp_sum(value);
  if (lane == 0) of_warp[team.thread / kWarp] = value;
  __syncthreads();
  value = warp_sum(lane < team.threads / kWarp ? of_warp[lane] : V{});
  __syncthreads();  // of_warp may be written again
  return value;
}

template <Access kAccess, class T>
__device__ __forceinline__ void inject(Team team, InjectRow<T> const& row, float epsilon) {
  Part<T> const part = load_part<kAccess>(team, row.h, row.columns);
  float const mean = team_sum(team, sum_of(part)) / static_cast<float>(row.columns);
  Deviations const deviations = team_sum(team, deviations_of(team, part, row.columns, mean));
  store_part<kAccess>(team, part, row, norm_of(mean, deviations, row.columns, epsilon));
}

// Grid: teams along the rows.
template <Access kAccess, class T>
__global__ void __launch_bounds__(kMaxThreads) inject_kernel(__grid_constant__ RelayInjectArgs const args) {
  Team const team{static_cast<int32_t>(blockDim.x), static_cast<int32_t>(threadIdx.x)};
  for (int64_t i = blockIdx.x; i < args.rows; i += gridDim.x) {
    InjectRow<T> const row = inject_row<T>(args, i);
    if (args.relay_on[i] != 0) {
      inject<kAccess>(team, row, args.epsilon);
    } else {
      copy_row<kAccess>(team, row.x, row.relayed, row.columns);
    }
  }
}

bool aligned(RelayInjectArgs const& args, int64_t row_bytes) {
  auto const tensors = {args.x,           args.h,         args.beta_gamma,
                        args.norm_weight, args.norm_bias, static_cast<void const*>(args.relayed)};
  return row_bytes % 16 == 0 && std::all_of(tensors.begin(), tensors.end(), on_boundary);
}

template <class T>
cudaError_t launch_for(RelayInjectArgs const& args, cudaStream_t stream) {
  if (args.columns > kMaxInjectColumns) return cudaErrorInvalidValue;
  if (args.rows == 0 || args.columns == 0) return cudaSuccess;
  Device device{};
  cudaError_t const error = query_device(device);
  if (error != cudaSuccess) return error;
  int64_t const row_bytes = int64_t{args.columns} * int64_t{sizeof(T)};
  int32_t const threads = team_threads(row_bytes);
  dim3 const grid(grid_rows(args.rows, 1, threads, device));
  auto* const kernel = aligned(args, row_bytes) ? inject_kernel<Access::kVector, T>  //
                                                : inject_kernel<Access::kScalar, T>;
  return launch(kernel, args, grid, threads, stream);
}

}  // namespace

cudaError_t launch_relay_inject(RelayInjectArgs const& args, DType dtype, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return launch_for<float>(args, stream);
    case DType::kFloat16:
      return launch_for<Half>(args, stream);
    case DType::kBFloat16:
      return launch_for<BFloat16>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dflow
