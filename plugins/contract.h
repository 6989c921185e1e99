// The dflow:: plugins as their ONNX nodes have them: names, dtypes, shapes.
// Generated from dflow_trt/contract.py by build_scripts/gen_contract_header.py; do not edit.
#pragma once

#include <cstdint>

namespace dflow::contract {

enum class Kind {
  kFloat,  // float32, float16 or bfloat16, one for the whole node
  kInt64,
};

inline constexpr int32_t kRepeats = 0;  // a factor: the number of repeated inputs
inline constexpr int32_t kMaxRank = 3;

struct Dim {
  char letter;  // equal letters are equal sizes
  int32_t factor;
};

struct Tensor {
  char const* name;
  Kind kind;
  int32_t rank;
  Dim dims[kMaxRank];
  bool repeated;  // name_0, name_1, ...
};

struct Plugin {
  char const* name;
  Tensor const* inputs;
  int32_t num_inputs;  // a repeated input counts once
  Tensor output;
};

inline constexpr char kNamespace[] = "dflow";
inline constexpr char kVersion[] = "1";

namespace hidden_state_extract {

enum Input : int32_t { kTap, kRowCount };

inline constexpr Tensor kInputs[] = {
    {"tap", Kind::kFloat, 3, {{'B', 1}, {'S', 1}, {'E', 1}}, true},
    {"row_count", Kind::kInt64, 1, {{'B', 1}}, false},
};
inline constexpr Tensor kOutput = {"hidden", Kind::kFloat, 3, {{'B', 1}, {'S', 1}, {'E', kRepeats}}, false};
inline constexpr Plugin kPlugin = {"HiddenStateExtract", kInputs, 2, kOutput};

}  // namespace hidden_state_extract

namespace relay_inject {

enum Input : int32_t { kX, kH, kBetaGamma, kNormWeight, kNormBias, kRelayOn };

inline constexpr char kEpsilon[] = "epsilon";
inline constexpr float kEpsilonDefault = 1e-06F;
inline constexpr Tensor kInputs[] = {
    {"x", Kind::kFloat, 3, {{'B', 1}, {'J', 1}, {'E', 1}}, false},
    {"h", Kind::kFloat, 3, {{'B', 1}, {'J', 1}, {'E', 1}}, false},
    {"beta_gamma", Kind::kFloat, 3, {{'B', 1}, {'J', 1}, {'E', 2}}, false},
    {"norm_weight", Kind::kFloat, 1, {{'E', 1}}, false},
    {"norm_bias", Kind::kFloat, 1, {{'E', 1}}, false},
    {"relay_on", Kind::kInt64, 2, {{'B', 1}, {'J', 1}}, false},
};
inline constexpr Tensor kOutput = {"relayed", Kind::kFloat, 3, {{'B', 1}, {'J', 1}, {'E', 1}}, false};
inline constexpr Plugin kPlugin = {"RelayInject", kInputs, 6, kOutput};

}  // namespace relay_inject

}  // namespace dflow::contract
