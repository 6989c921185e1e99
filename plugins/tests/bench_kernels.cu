// How near the kernels come to a plain copy: each is timed against device-to-device copies that move as many bytes, in
// CUDA graphs that walk through more memory than the caches hold. Prints the card, the date and a table; the last line
// is JSON. Fails if a call that moves 16 MB or more is below the goal; exits with 77 where there is no GPU.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "../kernels/kernels.h"
#include "device.h"

namespace dflow::testing {
namespace {

constexpr double kGoal = 0.85;
constexpr int64_t kLarge = 16 << 20;
constexpr int64_t kArenaBytes = int64_t{2} << 30;
constexpr int kReplays = 5;
constexpr int64_t kBlock = 16;
constexpr int32_t kTaps = 5;

struct Model {
  char const* name;
  int32_t columns;
};
constexpr Model kModels[] = {{"Qwen3-1.7B", 2048}, {"Qwen3-4B", 2560}, {"Qwen3-8B", 4096}};

// Hands out pieces of one zeroed block of memory, again from the start when it is used up.
class Arena {
 public:
  Arena() : memory_(kArenaBytes) { require(cudaMemset(memory_.data(), 0, kArenaBytes)); }

  void* take(int64_t bytes) {
    if (used_ + bytes > kArenaBytes) used_ = 0;
    void* const piece = static_cast<char*>(memory_.data()) + used_;
    used_ += (bytes + 255) / 256 * 256;
    return piece;
  }

 private:
  DeviceMemory memory_;
  int64_t used_ = 0;
};

// Microseconds of one call, the best of some replays of a graph that has `calls` of them.
double time_of(Stream const& stream, int64_t calls, std::function<void()> const& enqueue) {
  Graph graph(stream, [&] {
    for (int64_t i = 0; i < calls; ++i) enqueue();
  });
  cudaEvent_t start, stop;
  require(cudaEventCreate(&start));
  require(cudaEventCreate(&stop));
  float best = std::numeric_limits<float>::max();
  for (int i = 0; i <= kReplays; ++i) {  // the first one warms up
    require(cudaEventRecord(start, stream));
    graph.launch();
    require(cudaEventRecord(stop, stream));
    require(cudaEventSynchronize(stop));
    float milliseconds = 0.0F;
    require(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i > 0) best = std::min(best, milliseconds);
  }
  require(cudaEventDestroy(start));
  require(cudaEventDestroy(stop));
  return best * 1e3 / static_cast<double>(calls);
}

class Bench {
 public:
  // Every row live, bfloat16.
  void extract(Model const& model, int64_t batch) {
    int64_t const tap_bytes = batch * kBlock * model.columns * 2;
    std::vector<int64_t> const counts(batch, kBlock);
    require(cudaMemcpy(row_count_.data(), counts.data(), batch * 8, cudaMemcpyHostToDevice));
    measure("extract", model, batch, 2 * kTaps * tap_bytes, [&] {
      HiddenStateExtractArgs args{
          {}, static_cast<int64_t const*>(row_count_.data()), nullptr, batch, kBlock, kTaps, model.columns};
      for (int32_t tap = 0; tap < kTaps; ++tap) args.taps[tap] = arena_.take(tap_bytes);
      args.hidden = arena_.take(kTaps * tap_bytes);
      require(launch_hidden_state_extract(args, DType::kBFloat16, stream_));
    });
  }

  // Every row relayed, float32.
  void inject(Model const& model, int64_t batch) {
    int64_t const rows = batch * kBlock;
    int64_t const bytes = rows * model.columns * 4;
    require(cudaMemset(relay_on_.data(), 1, rows * 8));
    measure("inject", model, batch, 5 * bytes, [&] {
      RelayInjectArgs args{};
      args.x = arena_.take(bytes);
      args.h = arena_.take(bytes);
      args.beta_gamma = arena_.take(2 * bytes);
      args.norm_weight = args.norm_bias = norm_.data();
      args.relay_on = static_cast<int64_t const*>(relay_on_.data());
      args.relayed = arena_.take(bytes);
      args.rows = rows;
      args.columns = model.columns;
      args.epsilon = 1e-6F;
      require(launch_relay_inject(args, DType::kFloat32, stream_));
    });
  }

  double worst() const { return worst_; }

 private:
  void measure(char const* kernel, Model const& model, int64_t batch, int64_t moved,
               std::function<void()> const& call) {
    int64_t const calls = std::clamp<int64_t>(kArenaBytes / moved, 8, 256);
    double const us = time_of(stream_, calls, call);
    double const copy_us = time_of(stream_, calls, [&] {
      void* const source = arena_.take(moved / 2);
      void* const target = arena_.take(moved / 2);
      require(cudaMemcpyAsync(target, source, moved / 2, cudaMemcpyDeviceToDevice, stream_));
    });
    if (moved >= kLarge) worst_ = std::min(worst_, copy_us / us);
    std::printf("%-8s %-11s %5lld %9.2f %9.2f %9.2f %8.0f %8.0f %9.2f\n", kernel, model.name,
                static_cast<long long>(batch), moved / 1e6, us, copy_us, moved / us / 1e3, moved / copy_us / 1e3,
                copy_us / us);
  }

  Stream stream_;
  Arena arena_;
  DeviceMemory row_count_{64 * 8}, relay_on_{64 * kBlock * 8}, norm_{8192 * 4};
  double worst_ = 1e9;
};

int run() {
  std::string const card = card_and_date();
  std::printf("%s\n%-8s %-11s %5s %9s %9s %9s %8s %8s %9s\n", card.c_str(), "kernel", "model", "batch", "MB", "us",
              "copy us", "GB/s", "copy", "fraction");
  Bench bench;
  for (Model const& model : kModels) {
    for (int64_t batch : {1, 4, 16, 64}) bench.extract(model, batch);
  }
  for (Model const& model : kModels) {
    for (int64_t batch : {1, 4, 16, 64}) bench.inject(model, batch);
  }
  std::printf("{\"card_and_date\": \"%s\", \"worst_large_fraction\": %.3f, \"goal\": %.2f}\n", card.c_str(),
              bench.worst(), kGoal);
  return bench.worst() >= kGoal ? 0 : 1;
}

}  // namespace
}  // namespace dflow::testing

int main() {
  return dflow::testing::run();
}
