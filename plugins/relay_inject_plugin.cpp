#include "relay_inject_plugin.h"

#include <cmath>
#include <new>
#include <stdexcept>

#include "fields.h"

namespace dflow {

namespace relay = contract::relay_inject;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

PluginFieldCollection const& RelayInjectPlugin::fields() {
  static PluginField const epsilon{relay::kEpsilon, &relay::kEpsilonDefault, PluginFieldType::kFLOAT32, 1};
  static PluginFieldCollection const all{1, &epsilon};
  return all;
}

RelayInjectPlugin::RelayInjectPlugin(float epsilon)
    : Plugin(kContract),
      epsilon_(epsilon),
      epsilon_field_(relay::kEpsilon, &epsilon_, PluginFieldType::kFLOAT32, 1),
      fields_to_serialize_{1, &epsilon_field_} {
  if (!std::isfinite(epsilon) || epsilon < 0.0F) {
    throw std::invalid_argument(std::string("field '") + relay::kEpsilon + "' is " + std::to_string(epsilon) +
                                "; expected a number from 0 on");
  }
}

RelayInjectPlugin::RelayInjectPlugin(PluginFieldCollection const& fields)
    : RelayInjectPlugin(read_only_field(fields, relay::kEpsilon, relay::kEpsilonDefault)) {}

nvinfer1::IPluginV3* RelayInjectPlugin::clone() noexcept {
  return new (std::nothrow) RelayInjectPlugin(epsilon_);
}

void RelayInjectPlugin::check_limits(Node const& node, Sizes const& sizes) const {
  if (sizes['E'] > kMaxInjectColumns) {
    throw std::invalid_argument(node.name(relay::kX) + " has " + std::to_string(sizes['E']) + " columns; at most " +
                                std::to_string(kMaxInjectColumns));
  }
}

int32_t RelayInjectPlugin::enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const*,
                                   void const* const* inputs, void* const* outputs, void*,
                                   cudaStream_t stream) noexcept {
  nvinfer1::Dims const& x = input_descs[relay::kX].dims;
  RelayInjectArgs args{};
  args.x = inputs[relay::kX];
  args.h = inputs[relay::kH];
  args.beta_gamma = inputs[relay::kBetaGamma];
  args.norm_weight = inputs[relay::kNormWeight];
  args.norm_bias = inputs[relay::kNormBias];
  args.relay_on = static_cast<int64_t const*>(inputs[relay::kRelayOn]);
  args.relayed = outputs[0];
  args.rows = x.d[0] * x.d[1];
  args.columns = static_cast<int32_t>(x.d[2]);
  args.epsilon = epsilon_;
  return status_of(launch_relay_inject(args, dtype_of(input_descs[relay::kX].type), stream));
}

}  // namespace dflow
