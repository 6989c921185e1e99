// The plugin library as TensorRT sees it, through its creators: test_plugins PLUGINS.so [REGISTRY.so]
//
// REGISTRY.so is a real TensorRT library (libnvinfer, its lean or dispatch runtime, TensorRT-RTX), whose plugin
// registry then loads the plugins and hands out the creators; without one they come straight from the plugin library.
#include <NvInfer.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <thread>

#include "../kernels/kernels.h"
#include "check.h"
#include "fake_tensorrt.h"

namespace dflow::testing {
namespace {

using namespace nvinfer1;
using Shape = std::vector<int64_t>;

char const* plugin_path = nullptr;
char const* registry_path = nullptr;
PlainFake plain;

template <class F>
F symbol(void* library, char const* name) {
  auto const found = reinterpret_cast<F>(dlsym(library, name));
  CHECK(found != nullptr, name);
  return found;
}

void* open(char const* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr, dlerror());
  return library;
}

IPluginRegistry* registry() {
  return symbol<IPluginRegistry* (*)()>(open(registry_path), "getPluginRegistry")();
}

void set_finder(void* finder) {
  symbol<void (*)(void*)>(open(plugin_path), "setLoggerFinder")(finder);
}

IPluginCreatorV3One* creator_in_library(char const* name) {
  int32_t count = 0;
  auto* const* creators =
      symbol<IPluginCreatorInterface* const* (*)(int32_t&)>(open(plugin_path), "getCreators")(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::strcmp(creator->getPluginName(), name) == 0) return creator;
  }
  throw std::runtime_error(std::string("no creator of ") + name);
}

IPluginCreatorV3One* creator(char const* name) {
  if (registry_path == nullptr) return creator_in_library(name);
  auto* const found = registry()->getCreator(name, "1", "dflow");
  CHECK(found != nullptr, name, " is not registered");
  return static_cast<IPluginCreatorV3One*>(found);
}

// A plugin and its capabilities.
struct Made {
  std::unique_ptr<IPluginV3> plugin;
  IPluginV3OneBuild* build() const { return of<IPluginV3OneBuild>(PluginCapabilityType::kBUILD); }
  IPluginV3OneRuntime* runtime() const { return of<IPluginV3OneRuntime>(PluginCapabilityType::kRUNTIME); }
  IPluginV3OneCore* core() const { return of<IPluginV3OneCore>(PluginCapabilityType::kCORE); }

  template <class Capability>
  Capability* of(PluginCapabilityType type) const {
    return static_cast<Capability*>(plugin->getCapabilityInterface(type));
  }
};

Made make(char const* name, std::vector<PluginField> const& fields = {}, TensorRTPhase phase = TensorRTPhase::kBUILD) {
  PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
  return {std::unique_ptr<IPluginV3>(creator(name)->createPlugin("layer", &collection, phase))};
}

Made make_extract() {
  return make("HiddenStateExtract");
}
Made make_inject() {
  return make("RelayInject");
}

void expect_message(std::string const& expected) {
  std::vector<std::string> const seen = plain.messages.take();
  CHECK(seen.size() == 1 && seen[0] == expected, "\n  expected: ", expected,
        "\n  logged:   ", seen.empty() ? "nothing" : seen[0]);
}

void expect_silence() {
  std::vector<std::string> const seen = plain.messages.take();
  CHECK(seen.empty(), seen[0]);
}

Dims dims_of(Shape const& shape) {
  Dims dims{static_cast<int32_t>(shape.size()), {}};
  std::copy(shape.begin(), shape.end(), dims.d);
  return dims;
}

// Calls getOutputShapes with -1 for sizes that are not constant (they are 1000 then), and gives the status.
int32_t output_shape(Made const& made, std::vector<Shape> const& inputs, Shape& output) {
  FakeBuilder builder;
  std::vector<DimsExprs> exprs;
  for (Shape const& shape : inputs) {
    DimsExprs expr{static_cast<int32_t>(shape.size()), {}};
    for (size_t i = 0; i < shape.size(); ++i) expr.d[i] = builder.dim(shape[i] < 0 ? 1000 : shape[i], shape[i] >= 0);
    exprs.push_back(expr);
  }
  DimsExprs result{};
  int32_t const status =
      made.build()->getOutputShapes(exprs.data(), static_cast<int32_t>(exprs.size()), nullptr, 0, &result, 1, builder);
  output.clear();
  for (int32_t i = 0; i < result.nbDims; ++i) {
    auto const* const dim = static_cast<FakeDim const*>(result.d[i]);
    output.push_back(dim->constant ? dim->value : -dim->value);
  }
  return status;
}

int32_t shape_change(Made const& made, std::vector<Shape> const& inputs) {
  std::vector<PluginTensorDesc> descs;
  for (Shape const& shape : inputs) descs.push_back({dims_of(shape), DataType::kFLOAT, TensorFormat::kLINEAR, 1.0F});
  return made.runtime()->onShapeChange(descs.data(), static_cast<int32_t>(descs.size()), nullptr, 0);
}

int32_t output_type(Made const& made, std::vector<DataType> const& inputs, DataType& output) {
  return made.build()->getOutputDataTypes(&output, 1, inputs.data(), static_cast<int32_t>(inputs.size()));
}

constexpr DataType kFloats[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
constexpr DataType kTypes[] = {DataType::kFLOAT, DataType::kHALF,  DataType::kBF16, DataType::kINT8,
                               DataType::kINT32, DataType::kINT64, DataType::kBOOL, DataType::kFP8};

std::vector<DataType> inject_types(DataType type) {
  return {type, type, type, type, type, DataType::kINT64};
}
std::vector<Shape> inject_shapes() {
  return {{4, 16, 64}, {4, 16, 64}, {4, 16, 128}, {64}, {64}, {4, 16}};
}
std::vector<Shape> extract_shapes() {
  return {{4, 16, 64}, {4, 16, 64}, {4, 16, 64}, {4}};
}

TEST(creators_have_the_contracts_names_and_fields) {
  for (char const* name : {"HiddenStateExtract", "RelayInject"}) {
    IPluginCreatorV3One* const found = creator(name);
    CHECK(std::strcmp(found->getPluginVersion(), "1") == 0, found->getPluginVersion());
    CHECK(std::strcmp(found->getPluginNamespace(), "dflow") == 0, found->getPluginNamespace());
  }
  CHECK(creator("HiddenStateExtract")->getFieldNames()->nbFields == 0, "fields");
  PluginFieldCollection const& fields = *creator("RelayInject")->getFieldNames();
  CHECK(fields.nbFields == 1 && std::strcmp(fields.fields[0].name, "epsilon") == 0, "fields");
  CHECK(fields.fields[0].type == PluginFieldType::kFLOAT32 && fields.fields[0].length == 1, "type of epsilon");
}

TEST(plugins_say_who_they_are) {
  for (char const* name : {"HiddenStateExtract", "RelayInject"}) {
    Made const made = make(name);
    CHECK(std::strcmp(made.core()->getPluginName(), name) == 0, made.core()->getPluginName());
    CHECK(std::strcmp(made.core()->getPluginNamespace(), "dflow") == 0, made.core()->getPluginNamespace());
    CHECK(made.build()->getNbOutputs() == 1, made.build()->getNbOutputs());
    CHECK(made.build()->getWorkspaceSize(nullptr, 0, nullptr, 0) == 0, "workspace");
  }
}

float serialised_epsilon(Made const& made) {
  PluginFieldCollection const& fields = *made.runtime()->getFieldsToSerialize();
  CHECK(fields.nbFields == 1 && fields.fields[0].type == PluginFieldType::kFLOAT32, "fields to serialise");
  float epsilon = 0.0F;
  std::memcpy(&epsilon, fields.fields[0].data, sizeof(epsilon));
  return epsilon;
}

TEST(fields_survive_serialisation_clones_and_contexts) {
  float const epsilon = 3.5e-5F;
  Made const made = make("RelayInject", {{"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1}});
  PluginFieldCollection const& fields = *made.runtime()->getFieldsToSerialize();
  std::vector<PluginField> const serialised(fields.fields, fields.fields + fields.nbFields);
  Made clone{std::unique_ptr<IPluginV3>(made.plugin->clone())};
  Made const attached{std::unique_ptr<IPluginV3>(clone.runtime()->attachToContext(nullptr))};
  clone.plugin.reset();
  CHECK(serialised_epsilon(attached) == epsilon, serialised_epsilon(attached));
  CHECK(serialised_epsilon(make("RelayInject", serialised, TensorRTPhase::kRUNTIME)) == epsilon, "runtime phase");
  CHECK(serialised_epsilon(make_inject()) == 1e-6F, "default ", serialised_epsilon(make_inject()));
  CHECK(make_extract().runtime()->getFieldsToSerialize()->nbFields == 0, "extract has none");
}

TEST(wrong_fields_are_refused_by_name) {
  float const negative = -1.0F;
  double const wide = 1e-6;
  CHECK(make("RelayInject", {{"epsilom", &negative, PluginFieldType::kFLOAT32, 1}}).plugin == nullptr, "made");
  expect_message("dflow::RelayInject: unknown field 'epsilom'; the only one is 'epsilon'");
  CHECK(make("RelayInject", {{"epsilon", &wide, PluginFieldType::kFLOAT64, 1}}).plugin == nullptr, "made");
  expect_message("dflow::RelayInject: field 'epsilon' is not one float32");
  CHECK(make("RelayInject", {{"epsilon", &negative, PluginFieldType::kFLOAT32, 1}}).plugin == nullptr, "made");
  expect_message("dflow::RelayInject: field 'epsilon' is -1.000000; expected a number from 0 on");
  CHECK(make("HiddenStateExtract", {{"taps", &wide, PluginFieldType::kINT32, 1}}).plugin == nullptr, "made");
  expect_message("dflow::HiddenStateExtract: unknown field 'taps'; there are none");
}

TEST(the_output_has_the_type_of_the_first_input) {
  for (DataType type : kFloats) {
    DataType output{};
    CHECK(output_type(make_inject(), inject_types(type), output) == 0 && output == type, "inject");
    CHECK(output_type(make_extract(), {type, type, DataType::kINT64}, output) == 0 && output == type, "extract");
  }
  expect_silence();
}

TEST(wrong_types_are_refused_by_the_tensors_name) {
  DataType output{};
  std::vector<DataType> types = inject_types(DataType::kHALF);
  types[2] = DataType::kFLOAT;
  CHECK(output_type(make_inject(), types, output) != 0, "taken");
  expect_message("dflow::RelayInject: input 2 'beta_gamma' is float32; expected float16");
  types = inject_types(DataType::kBF16);
  types[5] = DataType::kBOOL;
  CHECK(output_type(make_inject(), types, output) != 0, "taken");
  expect_message("dflow::RelayInject: input 5 'relay_on' is bool; expected int64");
  CHECK(output_type(make_inject(), inject_types(DataType::kINT32), output) != 0, "taken");
  expect_message("dflow::RelayInject: input 0 'x' is int32; expected float32, float16 or bfloat16");
  CHECK(output_type(make_extract(), {DataType::kHALF, DataType::kBF16, DataType::kINT64}, output) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: input 1 'tap_1' is bfloat16; expected float16");
  CHECK(output_type(make_extract(), {DataType::kHALF, DataType::kHALF, DataType::kINT32}, output) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: input 2 'row_count' is int32; expected int64");
}

// Of all types at every position, exactly the contract's are supported, and only in linear layout.
void check_formats(Made const& made, std::vector<DataType> const& right) {
  int32_t const inputs = static_cast<int32_t>(right.size()) - 1;
  for (int32_t position = 0; position <= inputs; ++position) {
    for (DataType type : kTypes) {
      for (TensorFormat format : {TensorFormat::kLINEAR, TensorFormat::kCHW32}) {
        std::vector<DynamicPluginTensorDesc> descs(right.size());
        for (size_t i = 0; i < right.size(); ++i) descs[i].desc = {{}, right[i], TensorFormat::kLINEAR, 1.0F};
        descs[position].desc.type = type;
        descs[position].desc.format = format;
        bool const is_float = std::find(std::begin(kFloats), std::end(kFloats), type) != std::end(kFloats);
        bool const right_type = position == 0 ? is_float : type == right[position];
        bool const supported = made.build()->supportsFormatCombination(position, descs.data(), inputs, 1);
        CHECK(supported == (right_type && format == TensorFormat::kLINEAR), "position ", position, ", type ",
              static_cast<int>(type), ", format ", static_cast<int>(format));
      }
    }
  }
}

TEST(exactly_the_contracts_types_are_supported) {
  for (DataType type : kFloats) {
    std::vector<DataType> inject = inject_types(type);
    inject.push_back(type);
    check_formats(make_inject(), inject);
    check_formats(make_extract(), {type, type, type, DataType::kINT64, type});
  }
  expect_silence();
}

TEST(output_shapes_follow_the_inputs) {
  Shape output;
  CHECK(output_shape(make_inject(), {{-1, 16, 64}, {-1, 16, 64}, {-1, 16, 128}, {64}, {64}, {-1, 16}}, output) == 0,
        "inject");
  CHECK((output == Shape{-1000, 16, 64}), "inject");
  CHECK(output_shape(make_extract(), {{-1, -1, 64}, {-1, -1, 64}, {-1, -1, 64}, {-1}}, output) == 0, "extract");
  CHECK((output == Shape{-1000, -1000, 192}), "extract");
  CHECK(output_shape(make_extract(), {{-1, -1, 64}, {-1}}, output) == 0 && output.back() == 64, "one tap");
  expect_silence();
}

TEST(wrong_shapes_are_refused_by_the_tensors_name) {
  Shape output;
  CHECK(output_shape(make_inject(), {{-1, 16, 64}, {-1, 16, 64}, {-1, 16, 192}, {64}, {64}, {-1, 16}}, output) != 0,
        "taken");
  expect_message("dflow::RelayInject: input 2 'beta_gamma' has shape [?,16,192]; expected [B,J=16,2E=128]");
  CHECK(output_shape(make_inject(), {{4, 16, 64}, {4, 16, 64}, {4, 16, 128}, {64}, {64, 1}, {4, 16}}, output) != 0,
        "taken");
  expect_message("dflow::RelayInject: input 4 'norm_bias' has shape [64,1]; expected [E=64]");
  CHECK(output_shape(make_extract(), {{-1, -1, 64}, {-1, -1, 32}, {-1}}, output) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: input 1 'tap_1' has shape [?,?,32]; expected [B,S,E=64]");
  CHECK(output_shape(make_extract(), {{4, -1, 64}, {5}}, output) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: input 1 'row_count' has shape [5]; expected [B=4]");
}

TEST(wrong_numbers_of_inputs_are_refused) {
  Shape output;
  CHECK(output_shape(make_inject(), {{4, 16, 64}}, output) != 0, "taken");
  expect_message("dflow::RelayInject: has 1 inputs; expected 6");
  CHECK(output_shape(make_extract(), {{4, 16, 64}}, output) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: has 1 inputs; expected 2 or more");
  std::vector<Shape> many(kMaxTaps + 1, Shape{4, 16, 64});
  many.push_back({4});
  CHECK(output_shape(make_extract(), many, output) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: has 65 taps; at most 64");
}

TEST(sizes_beyond_a_kernel_are_refused) {
  CHECK(shape_change(make_inject(), {{1, 2, 8200}, {1, 2, 8200}, {1, 2, 16400}, {8200}, {8200}, {1, 2}}) != 0, "taken");
  expect_message("dflow::RelayInject: input 0 'x' has 8200 columns; at most 8192");
}

TEST(shapes_are_checked_again_when_they_change) {
  CHECK(shape_change(make_inject(), inject_shapes()) == 0, "inject");
  CHECK(shape_change(make_extract(), extract_shapes()) == 0, "extract");
  expect_silence();
  std::vector<Shape> shapes = inject_shapes();
  shapes[5] = {4, 15};
  CHECK(shape_change(make_inject(), shapes) != 0, "taken");
  expect_message("dflow::RelayInject: input 5 'relay_on' has shape [4,15]; expected [B=4,J=16]");
}

TEST(configuration_takes_open_sizes) {
  std::vector<DynamicPluginTensorDesc> descs(2);
  descs[0].desc.dims = dims_of({-1, -1, 64});
  descs[1].desc.dims = dims_of({-1});
  CHECK(make_extract().build()->configurePlugin(descs.data(), 2, nullptr, 1) == 0, "refused");
  descs[1].desc.dims = dims_of({-1, 1});
  CHECK(make_extract().build()->configurePlugin(descs.data(), 2, nullptr, 1) != 0, "taken");
  expect_message("dflow::HiddenStateExtract: input 1 'row_count' has shape [?,1]; expected [B]");
}

// One row: enough to reach the device, if there is one.
int32_t enqueue_inject(Made const& made, int64_t rows) {
  std::vector<PluginTensorDesc> inputs;
  for (Shape const& shape : std::vector<Shape>{{1, rows, 64}, {1, rows, 64}, {1, rows, 128}, {64}, {64}, {1, rows}}) {
    inputs.push_back({dims_of(shape), DataType::kBF16, TensorFormat::kLINEAR, 1.0F});
  }
  PluginTensorDesc const output = inputs[0];
  void const* const pointers[6] = {};
  void* const outputs[1] = {};
  return made.runtime()->enqueue(inputs.data(), &output, pointers, outputs, nullptr, nullptr);
}

TEST(empty_batches_are_done_without_a_device) {
  CHECK(enqueue_inject(make_inject(), 0) == 0, "failed");
  expect_silence();
}

TEST(a_failed_launch_is_logged) {
  if (access("/dev/nvidiactl", F_OK) == 0) return;  // there it would not fail
  CHECK(enqueue_inject(make_inject(), 1) != 0, "launched");
  std::vector<std::string> const seen = plain.messages.take();
  CHECK(seen.size() == 1 && seen[0].rfind("dflow::RelayInject: launch failed: CUDA ", 0) == 0, seen.size(),
        " messages");
}

TEST(loggers_of_tensorrt_11_are_found_as_well) {
  VersionedFake fake;
  set_finder(static_cast<logger_forms::VersionedFinder*>(&fake));
  CHECK(shape_change(make_inject(), {{1}}) != 0, "taken");
  set_finder(static_cast<logger_forms::PlainFinder*>(&plain));
  CHECK(fake.logger.messages.take().size() == 1, "not logged");
  expect_silence();
}

TEST(threads_do_not_disturb_one_another) {
  constexpr int kThreads = 8, kRounds = 200;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < kRounds; ++i) {
        Made const made = make_inject();
        Made const clone{std::unique_ptr<IPluginV3>(made.plugin->clone())};
        shape_change(clone, inject_shapes());
        shape_change(clone, extract_shapes());  // four inputs: refused
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(plain.messages.take().size() == kThreads * kRounds, "messages were lost");
}

TEST(a_registry_knows_the_plugins_by_version_and_namespace_alone) {
  if (registry_path == nullptr) return;
  CHECK(registry()->getCreator("RelayInject", "2", "dflow") == nullptr, "version 2");
  CHECK(registry()->getCreator("RelayInject", "1", "") == nullptr, "no namespace");
}

}  // namespace

int run_with(char const* plugins, char const* registry_library) {
  plugin_path = plugins;
  registry_path = registry_library;
  if (registry_path != nullptr && registry()->loadLibrary(plugin_path) == nullptr) {
    std::printf("the registry in %s does not load %s\n", registry_path, plugin_path);
    return 1;
  }
  set_finder(static_cast<logger_forms::PlainFinder*>(&plain));
  return check::run();
}

}  // namespace dflow::testing

int main(int argc, char** argv) {
  if (argc < 2) {
    std::printf("usage: %s PLUGINS.so [REGISTRY.so]\n", argv[0]);
    return 2;
  }
  return dflow::testing::run_with(argv[1], argc > 2 ? argv[2] : nullptr);
}
