// Just enough CUDA to run the kernels on a CPU, with no CUDA installed. Put this folder first on the include path and
// compile a .cu file as C++: `g++ -x c++ -I tests/cuda_on_cpu kernel.cu`.
//
// The blocks of a launch run one after another, the threads of a block as fibers in turn. A barrier, or a shuffle, ends
// a thread's turn; all threads of a block must then have come to the same one, or the run is aborted. That is stricter
// than a GPU, where shuffles bind a warp only.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks do not overlap in time

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerMultiProcessor, cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

// What the pretended device has; tests change it. backwards: the threads of a block take their turns from the last to
// the first, so that a result which depends on the order (a barrier is missing) shows. last_grid: of the last launch.
struct Device {
  int multiprocessors = 3;
  int threads_per_multiprocessor = 1024;
  bool backwards = false;
  dim3 last_grid;
};
extern Device device;

// Runs body() for every thread of the block (gridDim, blockDim and blockIdx are set).
void run_block(void (*body)(void const*), void const* argument);

// Ends this thread's turn at a barrier of the given kind.
void wait_for_block(char const* kind);

// The value that another thread of the block passed to the same call.
float exchange(float value, unsigned partner);

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  cuda_on_cpu::wait_for_block("__syncthreads");
}

inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  return cuda_on_cpu::exchange(value, threadIdx.x ^ static_cast<unsigned>(lanes));
}

inline cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  bool const count = attribute == cudaDevAttrMultiProcessorCount;
  *value = count ? cuda_on_cpu::device.multiprocessors : cuda_on_cpu::device.threads_per_multiprocessor;
  return cudaSuccess;
}

template <class Args>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Args), Args const& args) {
  struct Call {
    void (*kernel)(Args);
    Args const& args;
  } const call{kernel, args};
  auto* const body = +[](void const* c) { static_cast<Call const*>(c)->kernel(static_cast<Call const*>(c)->args); };
  gridDim = cuda_on_cpu::device.last_grid = config->gridDim;
  blockDim = config->blockDim;
  for (unsigned y = 0; y < gridDim.y; ++y) {
    for (unsigned x = 0; x < gridDim.x; ++x) {
      blockIdx = dim3(x, y);
      cuda_on_cpu::run_block(body, &call);
    }
  }
  return cudaSuccess;
}

// Memory is the host's, and what is enqueued or captured has run when the call returns.

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal };
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;

struct cudaDeviceProp {
  char name[32] = "a CPU that pretends";
};

inline char const* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid value";
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return *memory != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* target, void const* source, size_t bytes, cudaMemcpyKind) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamCreate(cudaStream_t*) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
