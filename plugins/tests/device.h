// What the programs that run on a GPU share.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dflow::testing {

inline constexpr int kNoGpu = 77;  // the exit status that says: skipped

inline void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// The first card's name and today's date; leaves the program with kNoGpu if there is no card.
inline std::string card_and_date() {
  int count = 0;
  cudaError_t const error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("skipped: no NVIDIA GPU (%s)\n", cudaGetErrorString(error));
    std::exit(kNoGpu);
  }
  cudaDeviceProp card{};
  require(cudaGetDeviceProperties(&card, 0));
  char date[16];
  std::time_t const now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::localtime(&now));
  return std::string(card.name) + ", " + date;
}

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) { require(cudaMalloc(&data_, bytes)); }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory(DeviceMemory const&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() { require(cudaStreamCreate(&stream_)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(Stream const&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// What enqueue() puts on a stream, captured once and replayed. It runs once outside of the capture as well, for a
// kernel is loaded at its first launch, which a capture need not survive.
class Graph {
 public:
  template <class Enqueue>
  Graph(Stream const& stream, Enqueue&& enqueue) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    enqueue();
    require(cudaStreamSynchronize(stream));
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    enqueue();
    require(cudaStreamEndCapture(stream, &graph));
    require(cudaGraphInstantiate(&executable_, graph, 0));
    require(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(Graph const&) = delete;

  void launch() { require(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace dflow::testing
