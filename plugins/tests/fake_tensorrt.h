// Stand-ins for what TensorRT gives to a plugin: a logger with its finder, dimension expressions and their builder.
#pragma once

#include <NvInfer.h>

#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "../logger_forms.h"

namespace dflow::testing {

class Messages {
 public:
  void add(char const* message) {
    std::lock_guard<std::mutex> const lock(mutex_);
    messages_.emplace_back(message);
  }

  std::vector<std::string> take() {
    std::lock_guard<std::mutex> const lock(mutex_);
    return std::exchange(messages_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> messages_;
};

// TensorRT 10's form.
struct PlainFake final : logger_forms::PlainFinder, logger_forms::PlainLogger {
  Messages messages;
  void* find_logger() override { return static_cast<logger_forms::PlainLogger*>(this); }
  void log(logger_forms::Severity, char const* message) noexcept override { messages.add(message); }
};

// TensorRT 11's form: a logger and a finder apart, for each has its own versioned base.
struct VersionedFake final : logger_forms::VersionedFinder {
  struct Logger final : logger_forms::VersionedLogger {
    Messages messages;
    nvinfer1::InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
    void log(logger_forms::Severity, char const* message) noexcept override { messages.add(message); }
  } logger;
  nvinfer1::InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
  void* find_logger() override { return static_cast<logger_forms::VersionedLogger*>(&logger); }
};

// A dimension with a value, which only a constant one tells.
class FakeDim final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  FakeDim(int64_t value, bool constant) : value(value), constant(constant) { mImpl = this; }

  int64_t const value;
  bool const constant;

 private:
  bool isConstant() const override { return constant; }
  int64_t getConstantValue() const override { return constant ? value : INT64_MIN; }
  bool isSizeTensor() const override { return false; }
};

class FakeBuilder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  FakeBuilder() { mImpl = this; }

  FakeDim const* dim(int64_t value, bool constant) { return &dims_.emplace_back(value, constant); }

 private:
  nvinfer1::IDimensionExpr const* constant(int64_t value) override { return dim(value, true); }
  nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation operation, nvinfer1::IDimensionExpr const& a,
                                            nvinfer1::IDimensionExpr const& b) override {
    if (operation != nvinfer1::DimensionOperation::kPROD) return nullptr;
    auto const& x = static_cast<FakeDim const&>(a);
    auto const& y = static_cast<FakeDim const&>(b);
    return dim(x.value * y.value, x.constant && y.constant);
  }
  nvinfer1::IDimensionExpr const* declareSizeTensor(int32_t, nvinfer1::IDimensionExpr const&,
                                                    nvinfer1::IDimensionExpr const&) override {
    return nullptr;
  }

  std::deque<FakeDim> dims_;
};

}  // namespace dflow::testing
