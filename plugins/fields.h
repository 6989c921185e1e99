// Reading plugin fields.
#pragma once

#include <NvInfer.h>

namespace dflow {

// The value of the only field that a plugin has, or `missing` where it is not given. Throws on any other field, and on
// any other type or length of this one.
float read_only_field(nvinfer1::PluginFieldCollection const& fields, char const* name, float missing);

// Throws if there is any field.
void read_no_field(nvinfer1::PluginFieldCollection const& fields);

}  // namespace dflow
