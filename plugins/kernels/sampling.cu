#include "sampling.cuh"

#include "kernels.h"
#include "launch.h"

namespace dflow {
namespace {

constexpr int32_t kSamplers = 512;  // threads on one row

__device__ __forceinline__ void add_shared(uint64_t* sum, uint64_t amount) {
#ifdef __CUDACC__
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(amount));
#else
  *sum += amount;  // on the CPU the threads of a block take turns
#endif
}

// The threads of a block, as draw_token wants them.
class Block {
 public:
  int32_t const threads = kSamplers;
  int32_t const thread = static_cast<int32_t>(threadIdx.x);

  __device__ explicit Block(uint64_t* shared) : bins_(shared), values_(shared + kBins) {}

  __device__ void wait() const { __syncthreads(); }

  __device__ void clear_bins() {
    if (thread < static_cast<int32_t>(kBins)) bins_[thread] = 0;
    wait();
  }
  __device__ void add(uint32_t bin, uint64_t amount) {
    if (amount > 0) add_shared(bins_ + bin, amount);
  }
  __device__ uint64_t bin(uint32_t i) const { return bins_[i]; }

  // Sums over ever longer runs of threads that end with this one; what all but this one came to.
  __device__ uint64_t before(uint64_t value) {
    uint64_t run = value;
    for (int32_t step = 1; step < threads; step *= 2) {
      publish(run);
      if (thread >= step) run += values_[thread - step];
      wait();
    }
    publish(run);
    uint64_t const before = run - value;
    return before;
  }

  __device__ uint64_t sum(uint64_t value) {
    before(value);
    return last();
  }

  __device__ uint32_t max(uint32_t value) {
    for (int32_t step = 1; step < threads; step *= 2) {
      publish(value);
      uint64_t const other = values_[thread ^ step];
      value = other > value ? static_cast<uint32_t>(other) : value;
      wait();
    }
    return value;
  }

  __device__ uint64_t from_owner(bool owns, uint64_t value) {
    if (owns) values_[threads - 1] = value;
    wait();
    return last();
  }

 private:
  // This thread's value, for all to read until the next wait.
  __device__ void publish(uint64_t value) {
    values_[thread] = value;
    wait();
  }

  __device__ uint64_t last() {
    uint64_t const value = values_[threads - 1];
    wait();
    return value;
  }

  uint64_t* bins_;
  uint64_t* values_;
};

struct SampleArgs {
  void const* logits;
  DflowDraw const* draws;
  int64_t* ids;
  int64_t columns;
  int64_t count;
  int32_t live;
};

// Grid: a block a draw, striding where there are more.
template <class T>
__global__ void __launch_bounds__(kSamplers, 1) sample_kernel(__grid_constant__ SampleArgs const args) {
  __shared__ uint64_t shared[kBins + kSamplers];
  Block block(shared);
  for (int64_t i = blockIdx.x; i < args.count; i += gridDim.x) {
    DflowDraw const& draw = args.draws[i];
    Row<T> const row{static_cast<T const*>(args.logits) + draw.row * args.columns, args.live};
    int64_t const id = draw_token(block, row, draw);
    if (block.thread == 0) args.ids[i] = id;
  }
}

template <class T>
cudaError_t launch_for(SampleArgs const& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  Device device{};
  cudaError_t const error = query_device(device);
  if (error != cudaSuccess) return error;
  return launch(sample_kernel<T>, args, dim3(grid_rows(args.count, 1, kSamplers, device)), kSamplers, stream);
}

}  // namespace
}  // namespace dflow

extern "C" __attribute__((visibility("default"))) int32_t dflow_sample(void const* logits, int32_t dtype,
                                                                       int64_t columns, int32_t live,
                                                                       DflowDraw const* draws, int64_t count,
                                                                       int64_t* ids, void* stream) {
  using namespace dflow;
  SampleArgs const args{logits, draws, ids, columns, count, live};
  cudaStream_t const queue = static_cast<cudaStream_t>(stream);
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      return launch_for<float>(args, queue);
    case DType::kFloat16:
      return launch_for<Half>(args, queue);
    case DType::kBFloat16:
      return launch_for<BFloat16>(args, queue);
  }
  return cudaErrorInvalidValue;
}
