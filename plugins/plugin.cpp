#include "plugin.h"

#include <stdexcept>

namespace dflow {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::IDimensionExpr;

std::vector<Dims> shapes_of(DimsExprs const* inputs, int32_t num_inputs) {
  std::vector<Dims> shapes(num_inputs);
  for (int32_t i = 0; i < num_inputs; ++i) {
    shapes[i].nbDims = inputs[i].nbDims;
    for (int32_t j = 0; j < inputs[i].nbDims; ++j) {
      IDimensionExpr const& dim = *inputs[i].d[j];
      shapes[i].d[j] = dim.isConstant() ? dim.getConstantValue() : Sizes::kUnknown;
    }
  }
  return shapes;
}

// The expression behind a letter of the contract: the first input that has it, and there undivided, tells.
IDimensionExpr const& find(char letter, Node const& node, DimsExprs const* inputs) {
  for (int32_t position = 0;; ++position) {
    contract::Tensor const& tensor = node.tensor(position);
    for (int32_t i = 0; i < tensor.rank; ++i) {
      if (tensor.dims[i].letter == letter && tensor.dims[i].factor == 1) return *inputs[position].d[i];
    }
  }
}

DimsExprs output_shape(Node const& node, int32_t num_inputs, DimsExprs const* inputs, nvinfer1::IExprBuilder& builder) {
  contract::Tensor const& output = node.tensor(num_inputs);
  DimsExprs shape{output.rank, {}};
  for (int32_t i = 0; i < output.rank; ++i) {
    auto const [letter, factor] = output.dims[i];
    IDimensionExpr const* const times = builder.constant(factor == contract::kRepeats ? node.repeats() : factor);
    shape.d[i] = builder.operation(nvinfer1::DimensionOperation::kPROD, *times, find(letter, node, inputs));
  }
  return shape;
}

}  // namespace

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

int32_t Plugin::getOutputDataTypes(DataType* output_types, int32_t, DataType const* input_types,
                                   int32_t num_inputs) const noexcept {
  return guarded(contract_.name, [&] {
    Node(contract_, num_inputs).check_types(input_types);
    output_types[0] = input_types[0];
  });
}

int32_t Plugin::getOutputShapes(DimsExprs const* inputs, int32_t num_inputs, DimsExprs const*, int32_t,
                                DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder& builder) noexcept {
  return guarded(contract_.name, [&] {
    Node const node(contract_, num_inputs);
    check(node, shapes_of(inputs, num_inputs));
    outputs[0] = output_shape(node, num_inputs, inputs, builder);
  });
}

bool Plugin::supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                       int32_t num_inputs, int32_t) noexcept {
  nvinfer1::PluginTensorDesc const& tensor = tensors[position].desc;
  bool allowed = false;
  guarded(contract_.name,
          [&] { allowed = Node(contract_, num_inputs).allows(position, tensor.type, tensors[0].desc.type); });
  return allowed && tensor.format == nvinfer1::TensorFormat::kLINEAR;
}

// Sizes are checked as the network has them; those of a profile come through onShapeChange().
int32_t Plugin::configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                                nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept {
  return guarded(contract_.name, [&] {
    std::vector<Dims> shapes(num_inputs);
    for (int32_t i = 0; i < num_inputs; ++i) shapes[i] = inputs[i].desc.dims;
    check(Node(contract_, num_inputs), shapes);
  });
}

int32_t Plugin::onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
                              nvinfer1::PluginTensorDesc const*, int32_t) noexcept {
  return guarded(contract_.name, [&] {
    std::vector<Dims> shapes(num_inputs);
    for (int32_t i = 0; i < num_inputs; ++i) shapes[i] = inputs[i].dims;
    check(Node(contract_, num_inputs), shapes);
  });
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return clone();
}

void Plugin::check(Node const& node, std::vector<Dims> const& shapes) const {
  check_limits(node, node.check_shapes(shapes));
}

int32_t Plugin::status_of(cudaError_t error) const noexcept {
  if (error == cudaSuccess) return 0;
  char const* const hint = error == cudaErrorNoKernelImageForDevice
                               ? "; the plugin was built for compute capability 8.0 and above, rebuild it for this GPU"
                               : "";
  return guarded(contract_.name,
                 [&] { throw std::runtime_error(std::string("launch failed: ") + cudaGetErrorString(error) + hint); });
}

DType dtype_of(DataType type) {
  switch (type) {
    case DataType::kHALF:
      return DType::kFloat16;
    case DataType::kBF16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

}  // namespace dflow
