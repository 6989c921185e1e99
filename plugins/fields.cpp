#include "fields.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace dflow {

float read_only_field(nvinfer1::PluginFieldCollection const& fields, char const* name, float missing) {
  float value = missing;
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    nvinfer1::PluginField const& field = fields.fields[i];
    if (std::strcmp(field.name, name) != 0) {
      throw std::invalid_argument(std::string("unknown field '") + field.name + "'; the only one is '" + name + "'");
    }
    if (field.type != nvinfer1::PluginFieldType::kFLOAT32 || field.length != 1 || field.data == nullptr) {
      throw std::invalid_argument(std::string("field '") + name + "' is not one float32");
    }
    std::memcpy(&value, field.data, sizeof(value));
  }
  return value;
}

void read_no_field(nvinfer1::PluginFieldCollection const& fields) {
  if (fields.nbFields > 0) {
    throw std::invalid_argument(std::string("unknown field '") + fields.fields[0].name + "'; there are none");
  }
}

}  // namespace dflow
