#include "node.h"

#include <stdexcept>

namespace dflow {
namespace {

using contract::Kind;
using nvinfer1::DataType;
using nvinfer1::Dims;

bool is_float(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

char const* name_of(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "float32";
    case DataType::kHALF:
      return "float16";
    case DataType::kBF16:
      return "bfloat16";
    case DataType::kINT32:
      return "int32";
    case DataType::kINT64:
      return "int64";
    case DataType::kBOOL:
      return "bool";
    default:
      return "a type of another kind";
  }
}

char const* name_of(Kind kind, DataType first) {
  switch (kind) {
    case Kind::kInt64:
      return "int64";
    case Kind::kFloat:
      return is_float(first) ? name_of(first) : "float32, float16 or bfloat16";
  }
  return "";
}

std::string text_of(Dims const& shape) {
  std::string text = "[";
  for (int32_t i = 0; i < shape.nbDims; ++i) {
    text += (i > 0 ? "," : "") + (shape.d[i] == Sizes::kUnknown ? "?" : std::to_string(shape.d[i]));
  }
  return text + "]";
}

}  // namespace

Node::Node(contract::Plugin const& plugin, int32_t num_inputs)
    : plugin_(plugin), num_inputs_(num_inputs), repeats_(num_inputs - plugin.num_inputs + 1) {
  bool const variadic = plugin.inputs[0].repeated;
  if (variadic ? repeats_ < 1 : repeats_ != 1) {
    throw std::invalid_argument("has " + std::to_string(num_inputs) + " inputs; expected " +
                                std::to_string(plugin.num_inputs) + (variadic ? " or more" : ""));
  }
}

contract::Tensor const& Node::tensor(int32_t position) const {
  if (position == num_inputs_) return plugin_.output;
  return plugin_.inputs[position < repeats_ ? 0 : position - repeats_ + 1];
}

std::string Node::name(int32_t position) const {
  contract::Tensor const& tensor = this->tensor(position);
  std::string const suffix = tensor.repeated ? "_" + std::to_string(position) : "";
  return "input " + std::to_string(position) + " '" + tensor.name + suffix + "'";
}

Sizes Node::check_shapes(std::vector<Dims> const& shapes) const {
  Sizes sizes;
  for (int32_t i = 0; i < num_inputs_; ++i) check_shape(i, shapes[i], sizes);
  return sizes;
}

void Node::check_shape(int32_t position, Dims const& shape, Sizes& sizes) const {
  contract::Tensor const& tensor = this->tensor(position);
  bool agrees = shape.nbDims == tensor.rank;
  for (int32_t i = 0; agrees && i < tensor.rank; ++i) {
    auto const [letter, factor] = tensor.dims[i];
    if (shape.d[i] == Sizes::kUnknown) continue;
    if (sizes[letter] == Sizes::kUnknown) sizes[letter] = shape.d[i] / factor;
    agrees = sizes[letter] * factor == shape.d[i];
  }
  if (!agrees) {
    throw std::invalid_argument(name(position) + " has shape " + text_of(shape) + "; expected " +
                                expectation(tensor, sizes));
  }
}

std::string Node::expectation(contract::Tensor const& tensor, Sizes const& sizes) const {
  std::string text = "[";
  for (int32_t i = 0; i < tensor.rank; ++i) {
    auto const [letter, factor] = tensor.dims[i];
    text += (i > 0 ? "," : "") + (factor == 1 ? "" : std::to_string(factor)) + letter;
    if (sizes[letter] != Sizes::kUnknown) text += "=" + std::to_string(factor * sizes[letter]);
  }
  return text + "]";
}

void Node::check_types(DataType const* types) const {
  for (int32_t i = 0; i < num_inputs_; ++i) {
    if (allows(i, types[i], types[0])) continue;
    throw std::invalid_argument(name(i) + " is " + name_of(types[i]) + "; expected " +
                                name_of(tensor(i).kind, types[0]));
  }
}

bool Node::allows(int32_t position, DataType type, DataType first) const {
  switch (tensor(position).kind) {
    case Kind::kInt64:
      return type == DataType::kINT64;
    case Kind::kFloat:
      return is_float(type) && type == first;
  }
  return false;
}

}  // namespace dflow
