// The two forms of TensorRT's logger and of its finder. TensorRT 11 and TensorRT-RTX have a versioned interface under
// them, TensorRT 10 has not. The headers know one form and the library that loads the plugins may have the other, and a
// call through the wrong one would hit another function: so both are spelled out.
//
// Not in an unnamed namespace: there the compiler would conclude that nobody implements them.
#pragma once

#include <NvInfer.h>

namespace dflow::logger_forms {

using Severity = nvinfer1::ILogger::Severity;

struct PlainFinder {
  virtual void* find_logger() = 0;
};

struct PlainLogger {
  virtual void log(Severity severity, char const* message) noexcept = 0;
};

struct VersionedFinder : nvinfer1::IVersionedInterface {
  virtual void* find_logger() = 0;
};

struct VersionedLogger : nvinfer1::IVersionedInterface {
  virtual void log(Severity severity, char const* message) noexcept = 0;
};

}  // namespace dflow::logger_forms
