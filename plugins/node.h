// What the contract says of a node with a given number of inputs, and whether tensors agree with it.
#pragma once

#include <NvInfer.h>

#include <array>
#include <string>
#include <vector>

#include "contract.h"

namespace dflow {

// The size behind each letter of the contract; kUnknown before it is known.
class Sizes {
 public:
  static constexpr int64_t kUnknown = -1;

  Sizes() { sizes_.fill(kUnknown); }
  int64_t& operator[](char letter) { return sizes_[static_cast<unsigned char>(letter)]; }
  int64_t operator[](char letter) const { return sizes_[static_cast<unsigned char>(letter)]; }

 private:
  std::array<int64_t, 128> sizes_;
};

class Node {
 public:
  // Throws if the plugin does not take that many inputs.
  Node(contract::Plugin const& plugin, int32_t num_inputs);

  // How often the repeated input occurs; 1 if there is none.
  int32_t repeats() const { return repeats_; }

  // The tensor at a position: the inputs, then the output.
  contract::Tensor const& tensor(int32_t position) const;

  // E.g. "input 4 'row_count'".
  std::string name(int32_t position) const;

  // Throws, naming the tensor and its shape, unless the inputs' shapes agree with the contract and with one another.
  // Dimensions of kUnknown agree with everything.
  Sizes check_shapes(std::vector<nvinfer1::Dims> const& shapes) const;

  // Throws, naming the tensor and its type, unless the inputs' types are the contract's.
  void check_types(nvinfer1::DataType const* types) const;

  // Whether a type is allowed at a position; `first` is the type of the first input.
  bool allows(int32_t position, nvinfer1::DataType type, nvinfer1::DataType first) const;

 private:
  void check_shape(int32_t position, nvinfer1::Dims const& shape, Sizes& sizes) const;
  std::string expectation(contract::Tensor const& tensor, Sizes const& sizes) const;

  contract::Plugin const& plugin_;
  int32_t num_inputs_;
  int32_t repeats_;
};

}  // namespace dflow
