// dflow::HiddenStateExtract: the outputs of the tapped layers side by side, zero from row_count on.
#pragma once

#include "plugin.h"

namespace dflow {

class HiddenStateExtractPlugin final : public Plugin {
 public:
  static constexpr contract::Plugin const& kContract = contract::hidden_state_extract::kPlugin;
  static nvinfer1::PluginFieldCollection const& fields();

  HiddenStateExtractPlugin() : Plugin(kContract) {}
  explicit HiddenStateExtractPlugin(nvinfer1::PluginFieldCollection const& fields);

  nvinfer1::IPluginV3* clone() noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  void check_limits(Node const& node, Sizes const& sizes) const override;
};

}  // namespace dflow
