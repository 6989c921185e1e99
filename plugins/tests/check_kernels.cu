// The kernels on a GPU, launched through a CUDA graph: against float64, and against the same functions on the CPU.
// Prints the card, the date and how far the two are apart; exits with 77 where there is no GPU.
#include <type_traits>

#include "../kernels/launch.h"
#include "check.h"
#include "device.h"
#include "host_rows.h"
#include "kernel_cases.h"

namespace dflow::testing {
namespace {

int64_t values_compared = 0;
int64_t values_unlike_the_cpu = 0;

// Copies of host tensors on the device, for the time of one call.
class Copies {
 public:
  template <class T>
  T* of(T* host, int64_t count) {
    size_t const bytes = static_cast<size_t>(count) * sizeof(T);
    memory_.emplace_back(bytes);
    require(cudaMemcpy(memory_.back().data(), host, bytes, cudaMemcpyHostToDevice));
    return static_cast<T*>(memory_.back().data());
  }

 private:
  std::vector<DeviceMemory> memory_;
};

template <class Launch>
void run_in_graph(Launch launch) {
  Stream stream;
  Graph graph(stream, [&] { require(launch(stream)); });
  graph.launch();
  require(cudaStreamSynchronize(stream));
}

template <class T>
T const* typed(void const* tensor) {
  return static_cast<T const*>(tensor);
}

template <class T>
void fetch(Guarded<T>& host, void const* device) {
  require(cudaMemcpy(host.data(), device, static_cast<size_t>(host.size()) * sizeof(T), cudaMemcpyDeviceToHost));
}

template <class T>
void inject_on_device(InjectCall<T>& call) {
  RelayInjectArgs args = call.args();
  int64_t const values = args.rows * args.columns;
  Copies copies;
  args.x = copies.of(typed<T>(args.x), values);
  args.h = copies.of(typed<T>(args.h), values);
  args.beta_gamma = copies.of(typed<T>(args.beta_gamma), 2 * values);
  args.norm_weight = copies.of(typed<T>(args.norm_weight), args.columns);
  args.norm_bias = copies.of(typed<T>(args.norm_bias), args.columns);
  args.relay_on = copies.of(args.relay_on, args.rows);
  args.relayed = copies.of(static_cast<T*>(args.relayed), values);
  run_in_graph([&](cudaStream_t stream) { return launch_relay_inject(args, kDType<T>, stream); });
  fetch(call.relayed(), args.relayed);
}

template <class T>
void check_inject(InjectCase const& c) {
  InjectCall<T> device(c), host(c);
  inject_on_device(device);
  device.check();
  relay_inject_on_host<Access::kScalar, T>(host.args());
  for (int64_t i = 0; i < device.relayed().size(); ++i) {
    ++values_compared;
    values_unlike_the_cpu += std::memcmp(&device.relayed()[i], &host.relayed()[i], sizeof(T)) != 0;
  }
}

template <class Bits>
void check_extract(ExtractCase const& c) {
  ExtractCall<Bits> call(c);
  HiddenStateExtractArgs args = call.args();
  int64_t const rows = args.batch * args.rows;
  Copies copies;
  for (int32_t tap = 0; tap < args.num_taps; ++tap) {
    args.taps[tap] = copies.of(typed<Bits>(args.taps[tap]), rows * args.columns);
  }
  args.row_count = copies.of(args.row_count, args.batch);
  args.hidden = copies.of(static_cast<Bits*>(args.hidden), rows * args.num_taps * args.columns);
  DType const dtype = sizeof(Bits) == 4 ? DType::kFloat32 : DType::kFloat16;
  run_in_graph([&](cudaStream_t stream) { return launch_hidden_state_extract(args, dtype, stream); });
  fetch(call.hidden(), args.hidden);
  call.check();
}

TEST(relay_inject_matches_float64_at_every_size) {
  for_each_format([](auto number) {
    for (int32_t columns : {1, 8, 33, 1000, 2048, 4096, 8191, 8192}) {
      check_inject<decltype(number)>({3, columns});
    }
  });
}

TEST(relay_inject_matches_float64_at_extreme_magnitudes) {
  for_each_format([](auto number) {
    using T = decltype(number);
    for (Numbers h :
         {Numbers{3e4, 1.0}, Numbers{-3e4, 300.0}, Numbers{0.0, 1e4}, Numbers{3e4, 0.0}, Numbers{0.0, 0.0}}) {
      check_inject<T>({2, 2560, h, {0.0, 3e3}});
    }
  });
}

TEST(relay_inject_strides_over_more_rows_than_fit) {
  Device device{};
  require(query_device(device));
  int64_t const teams = int64_t{device.multiprocessors} * device.threads_per_multiprocessor / kWarp;
  check_inject<float>({2 * teams + 1, 96});
}

TEST(hidden_state_extract_packs_and_zero_fills) {
  for (int32_t columns : {1, 7, 64, 1001, 2048, 20011}) {
    check_extract<uint16_t>({{3, 0, 5}, 5, 3, columns});
    check_extract<uint32_t>({{3, 0, 5}, 5, 3, columns});
  }
  check_extract<uint16_t>({std::vector<int64_t>(64, 11), 16, 5, 2560});
  check_extract<uint16_t>({{1, 2}, 2, kMaxTaps, 16});
}

}  // namespace
}  // namespace dflow::testing

int main() {
  std::printf("%s\n", dflow::testing::card_and_date().c_str());
  int const status = check::run();
  std::printf("RelayInject: %lld of %lld values differ from the CPU's in a bit\n",
              static_cast<long long>(dflow::testing::values_unlike_the_cpu),
              static_cast<long long>(dflow::testing::values_compared));
  return status;
}
