"""Write plugins/contract.h, the plugins' names, dtypes and shapes, from dflow_trt/contract.py.

python build_scripts/gen_contract_header.py           # write it
python build_scripts/gen_contract_header.py --check   # fail if it is stale
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from dflow_trt.contract import PLUGIN_DOMAIN, PLUGIN_VERSION, PLUGINS, PluginSpec, PluginTensor

HEADER = Path(__file__).resolve().parents[1] / "plugins" / "contract.h"
KINDS = {"float": "Kind::kFloat", "int64": "Kind::kInt64"}

PREAMBLE = f"""\
// The dflow:: plugins as their ONNX nodes have them: names, dtypes, shapes.
// Generated from dflow_trt/contract.py by build_scripts/gen_contract_header.py; do not edit.
#pragma once

#include <cstdint>

namespace dflow::contract {{

enum class Kind {{
  kFloat,  // float32, float16 or bfloat16, one for the whole node
  kInt64,
}};

inline constexpr int32_t kRepeats = 0;  // a factor: the number of repeated inputs
inline constexpr int32_t kMaxRank = 3;

struct Dim {{
  char letter;  // equal letters are equal sizes
  int32_t factor;
}};

struct Tensor {{
  char const* name;
  Kind kind;
  int32_t rank;
  Dim dims[kMaxRank];
  bool repeated;  // name_0, name_1, ...
}};

struct Plugin {{
  char const* name;
  Tensor const* inputs;
  int32_t num_inputs;  // a repeated input counts once
  Tensor output;
}};

inline constexpr char kNamespace[] = "{PLUGIN_DOMAIN}";
inline constexpr char kVersion[] = "{PLUGIN_VERSION}";
"""


def header() -> str:
    """The whole file."""
    return PREAMBLE + "".join(_plugin(spec) for spec in PLUGINS) + "\n}  // namespace dflow::contract\n"


def _plugin(spec: PluginSpec) -> str:
    scope = re.sub(r"(?<!^)(?=[A-Z])", "_", spec.name).lower()
    lines = ["", f"namespace {scope} {{", ""]
    lines += [f"enum Input : int32_t {{ {', '.join(_constant(tensor.name) for tensor in spec.inputs)} }};", ""]
    for name, default in spec.fields.items():
        lines.append(f'inline constexpr char {_constant(name)}[] = "{name}";')
        lines.append(f"inline constexpr float {_constant(name)}Default = {default!r}F;")
    lines.append("inline constexpr Tensor kInputs[] = {")
    lines += [f"    {_tensor(tensor)}," for tensor in spec.inputs]
    lines += ["};", f"inline constexpr Tensor kOutput = {_tensor(spec.output)};"]
    lines.append(f'inline constexpr Plugin kPlugin = {{"{spec.name}", kInputs, {len(spec.inputs)}, kOutput}};')
    return "\n".join([*lines, "", f"}}  // namespace {scope}", ""])


def _constant(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _tensor(tensor: PluginTensor) -> str:
    dims = ", ".join(_dim(dim) for dim in tensor.dims)
    repeated = "true" if tensor.repeated else "false"
    return f'{{"{tensor.name}", {KINDS[tensor.kind]}, {len(tensor.dims)}, {{{dims}}}, {repeated}}}'


def _dim(dim: str) -> str:
    factor = {"": "1", "n": "kRepeats"}.get(dim[:-1], dim[:-1])
    return f"{{'{dim[-1]}', {factor}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write plugins/contract.h from dflow_trt/contract.py.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is stale")
    if not parser.parse_args().check:
        HEADER.write_text(header(), encoding="utf-8")
    elif HEADER.read_text(encoding="utf-8") != header():
        sys.exit("plugins/contract.h is stale: run python build_scripts/gen_contract_header.py")


if __name__ == "__main__":
    main()
