// What TensorRT looks for in a plugin library.
#include "hidden_state_extract_plugin.h"
#include "log.h"
#include "relay_inject_plugin.h"

#define DFLOW_EXPORT extern "C" __attribute__((visibility("default")))

DFLOW_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static dflow::Creator<dflow::HiddenStateExtractPlugin> hidden_state_extract;
  static dflow::Creator<dflow::RelayInjectPlugin> relay_inject;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&hidden_state_extract, &relay_inject};
  count = 2;
  return creators;
}

DFLOW_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  dflow::set_logger_finder(finder);
}
