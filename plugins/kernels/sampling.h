// Draws tokens from rows of logits where they lie, so that only ids leave the device. A C interface: the runtime calls
// it without TensorRT, and tests call it without a GPU.
#pragma once

#include <cstdint>

extern "C" {

// One token to draw: exactly the draw that dflow_trt.method.sampling makes for a request without processors.
struct DflowDraw {
  uint64_t seed;          // the key of the counter-based random numbers,
  uint64_t sample_index;  // its second word,
  uint64_t position;      // and what it counts: the absolute position of the token
  double temperature;     // above 0
  double top_p;           // in (0, 1]; 1 keeps all
  double min_p;           // in [0, 1]; 0 keeps all
  int64_t top_k;          // 0 or less keeps all
  int64_t row;            // of the logits
};

// ids[i] is what draws[i] gives, of the first `live` ids of its row; -1 where the row's largest logit is not finite.
// dtype: as in kernels.h. columns: from row to row. All pointers are the device's. Gives a cudaError_t.
int32_t dflow_sample(void const* logits, int32_t dtype, int64_t columns, int32_t live, DflowDraw const* draws,
                     int64_t count, int64_t* ids, void* stream);
}
