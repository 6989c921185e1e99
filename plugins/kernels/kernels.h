// The two kernels as plain functions: raw pointers in, work on a stream. They allocate nothing and wait for nothing, so
// they may be captured in a CUDA graph; they keep no state, so any thread may call them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dflow {

enum class DType { kFloat32, kFloat16, kBFloat16 };

inline constexpr int32_t kMaxTaps = 64;
inline constexpr int32_t kMaxExtractColumns = 1 << 24;
inline constexpr int32_t kMaxInjectColumns = 8192;  // a team holds a row in its registers

// hidden[b, s, t * columns + e] = taps[t][b, s, e] where s < row_count[b], else 0. Rows from row_count on are not read.
struct HiddenStateExtractArgs {
  void const* taps[kMaxTaps];  // [batch, rows, columns] each
  int64_t const* row_count;    // [batch]
  void* hidden;                // [batch, rows, num_taps * columns]
  int64_t batch;
  int64_t rows;
  int32_t num_taps;
  int32_t columns;
};

cudaError_t launch_hidden_state_extract(HiddenStateExtractArgs const& args, DType dtype, cudaStream_t stream);

// relayed[r] = x[r] + beta[r] * LayerNorm(h[r]) + gamma[r] where relay_on[r] is not 0, else x[r] to the bit, h and
// beta_gamma of that row not being read.
struct RelayInjectArgs {
  void const* x;            // [rows, columns]
  void const* h;            // [rows, columns]
  void const* beta_gamma;   // [rows, 2 * columns]: beta, then gamma
  void const* norm_weight;  // [columns]
  void const* norm_bias;    // [columns]
  int64_t const* relay_on;  // [rows]
  void* relayed;            // [rows, columns]
  int64_t rows;
  int32_t columns;
  float epsilon;
};

cudaError_t launch_relay_inject(RelayInjectArgs const& args, DType dtype, cudaStream_t stream);

}  // namespace dflow
