#include "log.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <typeinfo>

#include "contract.h"
#include "logger_forms.h"

namespace dflow {
namespace {

using namespace logger_forms;
using GetLogger = void* (*)();

std::atomic<void*> finder{nullptr};
std::atomic<bool> is_versioned{false};
std::atomic<GetLogger> get_builder_logger{nullptr};

// Whether IVersionedInterface is among the bases that a class has one above the other.
bool has_versioned_base(std::type_info const* type) {
  char const* const wanted = typeid(nvinfer1::IVersionedInterface).name();
  while (type != nullptr && std::strcmp(type->name(), wanted) != 0) {
    auto const* const derived = dynamic_cast<abi::__si_class_type_info const*>(type);
    type = derived != nullptr ? derived->__base_type : nullptr;
  }
  return type != nullptr;
}

// The finder knows the loggers of engines and contexts, but none while a network is being defined. The builder's is
// what getLogger() gives, which has to be looked up: the plugins are not linked to any of the libraries that may load
// them. The one that did is where the finder's virtual table lies.
GetLogger get_logger_beside(nvinfer1::ILoggerFinder* finder) {
  Dl_info library{};
  if (dladdr(*reinterpret_cast<void**>(finder), &library) == 0) return nullptr;
  void* const handle = dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  auto const get_logger = reinterpret_cast<GetLogger>(dlsym(handle, "getLogger"));
  dlclose(handle);  // it stays loaded: whoever loaded the plugins needs it
  return get_logger;
}

void* find_logger() {
  void* const found = finder;
  if (found == nullptr) return nullptr;
  void* const logger = is_versioned ? static_cast<VersionedFinder*>(found)->find_logger()
                                    : static_cast<PlainFinder*>(found)->find_logger();
  GetLogger const get_logger = get_builder_logger;
  return logger == nullptr && get_logger != nullptr ? get_logger() : logger;
}

void send(void* logger, char const* message) {
  if (is_versioned) {
    static_cast<VersionedLogger*>(logger)->log(Severity::kERROR, message);
  } else {
    static_cast<PlainLogger*>(logger)->log(Severity::kERROR, message);
  }
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* given) noexcept {
  finder = nullptr;
  if (given == nullptr) return;
  is_versioned = has_versioned_base(&typeid(*given));
  get_builder_logger = get_logger_beside(given);
  finder = given;
}

void log_error(char const* who, char const* what) noexcept {
  char message[1024];
  std::snprintf(message, sizeof(message), "%s::%s: %s", contract::kNamespace, who, what);
  void* const logger = find_logger();
  if (logger != nullptr) {
    send(logger, message);
  } else {
    std::fprintf(stderr, "%s\n", message);
  }
}

}  // namespace dflow
