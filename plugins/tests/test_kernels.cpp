// The kernels themselves, launched through their launchers, on the CPU.
#include <vector>

#include "../kernels/launch.h"
#include "check.h"
#include "kernel_cases.h"

namespace dflow::testing {
namespace {

std::vector<cuda_on_cpu::Device> const kDevices = {{1, 32}, {3, 1024}, {3, 1024, true}, {132, 2048}};

template <class T>
void launch_inject(InjectCall<T>& call) {
  CHECK(launch_relay_inject(call.args(), kDType<T>, nullptr) == cudaSuccess, "launch failed");
  call.check();
}

TEST(relay_inject_is_right_on_small_and_large_devices) {
  for (cuda_on_cpu::Device const& device : kDevices) {
    cuda_on_cpu::device = device;
    for_each_format([](auto number) {
      for (int32_t columns : {5, 64, 1000, 2049}) {
        InjectCall<decltype(number)> call({11, columns});
        launch_inject(call);
      }
    });
  }
}

TEST(relay_inject_is_right_at_model_sizes) {
  for_each_format([](auto number) {
    for (int32_t columns : {2048, 2560, 4096, 8192}) {
      InjectCall<decltype(number)> call({3, columns, {3e3, 20.0}});
      launch_inject(call);
    }
  });
}

TEST(relay_inject_never_reads_h_of_rows_that_are_off) {
  int32_t const columns = 1024;  // a row of float32 fills a page
  InjectCase c{4, columns};
  c.edge = Edge::kFront;
  InjectCall<float> call(c);
  call.h().forbid(columns, columns);
  call.beta_gamma().forbid(2 * columns, 2 * columns);
  launch_inject(call);
}

TEST(relay_inject_refuses_rows_that_no_team_holds) {
  RelayInjectArgs args{};
  args.columns = kMaxInjectColumns + 1;
  args.rows = 1;
  CHECK(launch_relay_inject(args, DType::kFloat16, nullptr) == cudaErrorInvalidValue, "accepted");
}

template <class Bits>
void launch_extract(ExtractCall<Bits>& call) {
  DType const dtype = sizeof(Bits) == 4 ? DType::kFloat32 : DType::kBFloat16;
  CHECK(launch_hidden_state_extract(call.args(), dtype, nullptr) == cudaSuccess, "launch failed");
  call.check();
}

TEST(hidden_state_extract_is_right_on_small_and_large_devices) {
  for (cuda_on_cpu::Device const& device : kDevices) {
    cuda_on_cpu::device = device;
    for (int32_t columns : {1, 24, 1001, 2560}) {
      ExtractCall<uint16_t> narrow({{0, 7, 3, 1}, 7, 5, columns});
      ExtractCall<uint32_t> wide({{0, 7, 3, 1}, 7, 5, columns});
      launch_extract(narrow);
      launch_extract(wide);
    }
  }
}

TEST(hidden_state_extract_takes_the_largest_number_of_taps) {
  ExtractCall<uint16_t> call({{1, 2}, 2, kMaxTaps, 16});
  launch_extract(call);
}

TEST(hidden_state_extract_never_reads_past_row_count) {
  ExtractCase c{{1, 3}, 4, 2, 1024, Edge::kFront};
  ExtractCall<uint32_t> call(c);
  for (int32_t tap = 0; tap < c.num_taps; ++tap) {
    call.tap(tap).forbid(1 * c.columns, 3 * c.columns);
    call.tap(tap).forbid(7 * c.columns, 1 * c.columns);
  }
  launch_extract(call);
}

TEST(empty_tensors_launch_nothing) {
  CHECK(launch_hidden_state_extract({}, DType::kFloat32, nullptr) == cudaSuccess, "extract");
  CHECK(launch_relay_inject({}, DType::kFloat32, nullptr) == cudaSuccess, "inject");
}

// The grid strides over the rows: each must be visited once, by blocks that the device can hold.
TEST(every_row_is_visited_once_whatever_the_device) {
  for (int64_t rows : {1, 2, 5, 1023, 1024, 70001}) {
    for (int64_t parts : {1, 5, 64}) {
      for (int32_t threads : {32, 160, 512}) {
        for (Device device : {Device{1, 1024}, Device{20, 1536}, Device{148, 2048}, Device{1, 256}}) {
          uint32_t const grid = grid_rows(rows, parts, threads, device);
          int64_t const resident = int64_t{device.multiprocessors} * (device.threads_per_multiprocessor / threads);
          CHECK(grid >= 1 && grid <= rows, "grid ", grid, " for ", rows, " rows");
          CHECK(grid == 1 || (grid - 1) * parts < resident, "grid ", grid, " x ", parts, ", resident ", resident);
          int64_t visits = 0;
          for (int64_t block = 0; block < grid; ++block) visits += (rows - block + grid - 1) / grid;
          CHECK(visits == rows, visits, " visits of ", rows, " rows");
        }
      }
    }
  }
}

TEST(the_grid_follows_the_device) {
  cuda_on_cpu::device = {2, 512};
  ExtractCall<uint16_t> call({{50}, 100, 3, 2048});  // teams of 64 threads: 16 fit, 6 a tap
  launch_extract(call);
  CHECK(cuda_on_cpu::device.last_grid.x == 6 && cuda_on_cpu::device.last_grid.y == 3,  //
        "grid ", cuda_on_cpu::device.last_grid.x, " x ", cuda_on_cpu::device.last_grid.y);
}

}  // namespace
}  // namespace dflow::testing
