// Grids sized from the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dflow {

struct Device {
  int32_t multiprocessors;
  int32_t threads_per_multiprocessor;
};

// The current device. These attributes are kept by the runtime: asking for them neither waits nor breaks a capture.
inline cudaError_t query_device(Device& device) {
  int ordinal = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&device.threads_per_multiprocessor, cudaDevAttrMaxThreadsPerMultiProcessor, ordinal);
}

// Teams along the rows, when a row is shared by `parts` of them: as many as the device holds at once, or one a row
// where there are fewer. Each strides over the rows that are left.
inline uint32_t grid_rows(int64_t rows, int64_t parts, int32_t threads, Device device) {
  int64_t const resident = int64_t{device.multiprocessors} * (device.threads_per_multiprocessor / threads);
  int64_t const teams = resident > parts ? (resident + parts - 1) / parts : 1;
  return static_cast<uint32_t>(rows < teams ? rows : teams);
}

inline bool on_boundary(void const* tensor) {
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

template <class Args>
cudaError_t launch(void (*kernel)(Args), Args const& args, dim3 grid, int32_t threads, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace dflow
