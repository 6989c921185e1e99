// The kernels on a CPU for callers from other languages, e.g. Python's ctypes.
#include "../kernels/kernels.h"

extern "C" int launch_hidden_state_extract(dflow::HiddenStateExtractArgs const* args, int dtype) {
  return dflow::launch_hidden_state_extract(*args, static_cast<dflow::DType>(dtype), nullptr);
}

extern "C" int launch_relay_inject(dflow::RelayInjectArgs const* args, int dtype) {
  return dflow::launch_relay_inject(*args, static_cast<dflow::DType>(dtype), nullptr);
}
