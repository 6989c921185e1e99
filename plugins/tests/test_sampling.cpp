// The arithmetic of a draw with one thread, for the tests in Python: they hold it against dflow_trt.method.sampling,
// and the kernel with its many threads, which this library has too, against it.
#include <cuda_runtime.h>

#include "../kernels/sampling.cuh"

namespace dflow {
namespace {

// A group of one.
class Alone {
 public:
  int32_t const threads = 1;
  int32_t const thread = 0;

  void wait() const {}
  uint32_t max(uint32_t value) const { return value; }
  uint64_t sum(uint64_t value) const { return value; }
  uint64_t before(uint64_t) const { return 0; }
  uint64_t from_owner(bool, uint64_t value) const { return value; }
  void clear_bins() {
    for (uint64_t& bin : bins_) bin = 0;
  }
  void add(uint32_t bin, uint64_t amount) { bins_[bin] += amount; }
  uint64_t bin(uint32_t i) const { return bins_[i]; }

 private:
  uint64_t bins_[kBins] = {};
};

}  // namespace
}  // namespace dflow

extern "C" {

void dflow_sample_alone(float const* logits, int64_t columns, int32_t live, DflowDraw const* draws, int64_t count,
                        int64_t* ids) {
  for (int64_t i = 0; i < count; ++i) {
    dflow::Alone group;
    ids[i] = dflow::draw_token(group, dflow::Row<float>{logits + draws[i].row * columns, live}, draws[i]);
  }
}

// The device that the kernel is launched on, see cuda_on_cpu/cuda_runtime.h; gives the blocks of the launch before.
uint32_t dflow_pretend(int32_t multiprocessors, int32_t threads, int32_t backwards) {
  uint32_t const blocks = cuda_on_cpu::device.last_grid.x;
  cuda_on_cpu::device = {multiprocessors, threads, backwards != 0};
  return blocks;
}

void dflow_random_bits(DflowDraw const* draws, int64_t count, uint64_t* bits) {
  for (int64_t i = 0; i < count; ++i) bits[i] = dflow::random_bits(draws[i]);
}
}
