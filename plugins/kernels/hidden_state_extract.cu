#include <algorithm>

#include "hidden_state_extract.cuh"
#include "launch.h"

namespace dflow {
namespace {

// Grid: teams along the rows, taps.
template <Access kAccess, class Bits>
__global__ void __launch_bounds__(kMaxThreads) extract_kernel(__grid_constant__ HiddenStateExtractArgs const args) {
  Team const team{static_cast<int32_t>(blockDim.x), static_cast<int32_t>(threadIdx.x)};
  int32_t const tap = static_cast<int32_t>(blockIdx.y);
  for (int64_t row = blockIdx.x; row < args.batch * args.rows; row += gridDim.x) {
    extract<kAccess>(team, extract_row<Bits>(args, row, tap), args.columns);
  }
}

bool aligned(HiddenStateExtractArgs const& args, int64_t row_bytes) {
  return row_bytes % 16 == 0 && on_boundary(args.hidden) &&
         std::all_of(args.taps, args.taps + args.num_taps, on_boundary);
}

template <class Bits>
cudaError_t launch_for(HiddenStateExtractArgs const& args, cudaStream_t stream) {
  int64_t const rows = args.batch * args.rows;
  if (rows == 0 || args.columns == 0) return cudaSuccess;
  Device device{};
  cudaError_t const error = query_device(device);
  if (error != cudaSuccess) return error;
  int64_t const row_bytes = int64_t{args.columns} * int64_t{sizeof(Bits)};
  int32_t const threads = team_threads(row_bytes);
  dim3 const grid(grid_rows(rows, args.num_taps, threads, device), static_cast<unsigned>(args.num_taps));
  auto* const kernel = aligned(args, row_bytes) ? extract_kernel<Access::kVector, Bits>  //
                                                : extract_kernel<Access::kScalar, Bits>;
  return launch(kernel, args, grid, threads, stream);
}

}  // namespace

cudaError_t launch_hidden_state_extract(HiddenStateExtractArgs const& args, DType dtype, cudaStream_t stream) {
  return dtype == DType::kFloat32 ? launch_for<uint32_t>(args, stream) : launch_for<uint16_t>(args, stream);
}

}  // namespace dflow
