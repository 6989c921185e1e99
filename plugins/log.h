// Errors go to TensorRT's logger. Inside the plugins they are exceptions; guarded() is the border to TensorRT, which
// must never see one.
#pragma once

#include <NvInfer.h>

#include <exception>
#include <string>

namespace dflow {

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// To the logger of the engine or context that called the plugin on this thread; to stderr where there is none.
void log_error(char const* who, char const* what) noexcept;

// Runs body(). What it throws is logged, and gives a status that TensorRT takes for failure.
template <class Body>
int32_t guarded(char const* who, Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (std::exception const& error) {
    log_error(who, error.what());
    return -1;
  }
}

}  // namespace dflow
