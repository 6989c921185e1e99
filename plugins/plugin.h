// What both plugins have in common: everything that follows from the contract.
#pragma once

#include <NvInfer.h>

#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "log.h"
#include "node.h"

namespace dflow {

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuild,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit Plugin(contract::Plugin const& contract) : contract_(contract) {}

  // Not copied but cloned: the fields to serialise point into the object itself.
  Plugin(Plugin const&) = delete;
  Plugin& operator=(Plugin const&) = delete;

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;

  char const* getPluginName() const noexcept override { return contract_.name; }
  char const* getPluginVersion() const noexcept override { return contract::kVersion; }
  char const* getPluginNamespace() const noexcept override { return contract::kNamespace; }

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t num_outputs,
                             nvinfer1::DataType const* input_types, int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                          nvinfer1::DimsExprs const* shape_inputs, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                          nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t num_outputs) noexcept override;

  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
                        nvinfer1::PluginTensorDesc const* outputs, int32_t num_outputs) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;

 protected:
  // Throws if sizes that agree with the contract are more than the kernel takes.
  virtual void check_limits(Node const& node, Sizes const& sizes) const = 0;

  // The status of a launch, logged if it failed.
  int32_t status_of(cudaError_t error) const noexcept;

 private:
  void check(Node const& node, std::vector<nvinfer1::Dims> const& shapes) const;

  contract::Plugin const& contract_;
};

// The kernels' name of a type that supportsFormatCombination() let pass.
DType dtype_of(nvinfer1::DataType type);

// Makes plugins of class P, which has P::kContract, P::fields() and P(PluginFieldCollection const&).
template <class P>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  char const* getPluginName() const noexcept override { return P::kContract.name; }
  char const* getPluginVersion() const noexcept override { return contract::kVersion; }
  char const* getPluginNamespace() const noexcept override { return contract::kNamespace; }

  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &P::fields(); }

  nvinfer1::IPluginV3* createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    std::unique_ptr<P> plugin;
    guarded(P::kContract.name, [&] { plugin = std::make_unique<P>(*fields); });
    return plugin.release();
  }
};

}  // namespace dflow
