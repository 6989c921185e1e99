"""The README of an export: what its files are, how they are served, and what may be compared with what."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflow_trt.spec import DFlashSpec

NAME = "README.md"

_TEXT = """# {name} for TensorRT-LLM {version}

| file | what it is |
| --- | --- |
| `drafter/` | the drafter in the layout that TensorRT-LLM's DFlash reads |
{apart}| `trtllm-serve.yaml` | LLM API arguments with `DFlashDecodingConfig` |
| `triton/tensorrt_llm/1/model.yaml` | the same for the Triton model `llmapi`, in place of the one that comes with it |

```bash
trtllm-serve {target} --config {output}/trtllm-serve.yaml
```

Paths in both YAML files are absolute: change `speculative_model` and `model` when the folders move.
{notes}
The same pair here, with blocks of {block_size} and {num_drafts} drafts a round:

```bash
dflow-trt build --target {target} --drafter {drafter} --output bundle
dflow-trt generate bundle --strategy {strategy} --compare-ar --prompts prompts.jsonl
```

{comparison} Drafts there are computed in half precision, so near ties may fall the other way.
"""
_SAME = "Compare the strategy `{strategy}` here with DFlash there: both draft from the same tensors."
_OTHER = "Every strategy of this drafter has its causal head, DFlash there has none: tokens are comparable, not drafts."
_APART = {
    "relay/": "the relay of DFlow, which TensorRT-LLM does not have: its tensors and its config keys, unchanged",
    "head/": "Domino's causal head, which TensorRT-LLM's DFlash does not have: tensors and config keys, unchanged",
}


@dataclass(frozen=True)
class Places:
    """Where the checkpoints are, and the export."""

    target: Path
    drafter: Path
    output: Path


def text(spec: DFlashSpec, version: str, places: Places, notes: Sequence[str]) -> str:
    """README.md of the export of this drafter."""
    strategy = spec.strategies[-1]  # without its relay, where it has one
    there = {"relay/": spec.relay is not None, "head/": spec.head is not None}
    return _TEXT.format(
        name=spec.name,
        version=version,
        apart="".join(f"| `{folder}` | {what} |\n" for folder, what in _APART.items() if there[folder]),
        **{name: shlex.quote(str(path)) for name, path in vars(places).items()},
        notes="".join(f"\n- {note}" for note in notes) + ("\n" if notes else ""),
        block_size=spec.block_size,
        num_drafts=spec.num_drafts,
        strategy=strategy,
        comparison=_OTHER if spec.head else _SAME.format(strategy=strategy),
    )
