// dflow::RelayInject: x + beta * LayerNorm(h) + gamma where relay_on is not 0, else x.
#pragma once

#include "plugin.h"

namespace dflow {

class RelayInjectPlugin final : public Plugin {
 public:
  static constexpr contract::Plugin const& kContract = contract::relay_inject::kPlugin;
  static nvinfer1::PluginFieldCollection const& fields();

  explicit RelayInjectPlugin(float epsilon);
  explicit RelayInjectPlugin(nvinfer1::PluginFieldCollection const& fields);

  nvinfer1::IPluginV3* clone() noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &fields_to_serialize_; }

 private:
  void check_limits(Node const& node, Sizes const& sizes) const override;

  float const epsilon_;
  nvinfer1::PluginField const epsilon_field_;
  nvinfer1::PluginFieldCollection const fields_to_serialize_;
};

}  // namespace dflow
