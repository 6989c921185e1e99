#include "hidden_state_extract_plugin.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "fields.h"

namespace dflow {

nvinfer1::PluginFieldCollection const& HiddenStateExtractPlugin::fields() {
  static nvinfer1::PluginFieldCollection const none{};
  return none;
}

HiddenStateExtractPlugin::HiddenStateExtractPlugin(nvinfer1::PluginFieldCollection const& fields)
    : HiddenStateExtractPlugin() {
  read_no_field(fields);
}

nvinfer1::IPluginV3* HiddenStateExtractPlugin::clone() noexcept {
  return new (std::nothrow) HiddenStateExtractPlugin();
}

nvinfer1::PluginFieldCollection const* HiddenStateExtractPlugin::getFieldsToSerialize() noexcept {
  return &fields();
}

void HiddenStateExtractPlugin::check_limits(Node const& node, Sizes const& sizes) const {
  if (node.repeats() > kMaxTaps) {
    throw std::invalid_argument("has " + std::to_string(node.repeats()) + " taps; at most " + std::to_string(kMaxTaps));
  }
  if (sizes['E'] > kMaxExtractColumns) {
    throw std::invalid_argument(node.name(0) + " has " + std::to_string(sizes['E']) + " columns; at most " +
                                std::to_string(kMaxExtractColumns));
  }
}

int32_t HiddenStateExtractPlugin::enqueue(nvinfer1::PluginTensorDesc const* input_descs,
                                          nvinfer1::PluginTensorDesc const* output_descs, void const* const* inputs,
                                          void* const* outputs, void*, cudaStream_t stream) noexcept {
  nvinfer1::Dims const& tap = input_descs[0].dims;
  HiddenStateExtractArgs args{};
  args.hidden = outputs[0];
  args.batch = tap.d[0];
  args.rows = tap.d[1];
  args.columns = static_cast<int32_t>(tap.d[2]);
  args.num_taps = tap.d[2] > 0 ? static_cast<int32_t>(output_descs[0].dims.d[2] / tap.d[2]) : 0;
  std::copy_n(inputs, args.num_taps, args.taps);
  args.row_count = static_cast<int64_t const*>(inputs[args.num_taps]);
  return status_of(launch_hidden_state_extract(args, dtype_of(input_descs[0].type), stream));
}

}  // namespace dflow
