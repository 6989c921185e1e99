"""docs/serving.md shows the tables of tensors as they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dflow_trt.serving import tensors as t

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "serving.md"


def rows(tensors: Iterable[t.Tensor]) -> list[str]:
    """The lines of a table, as they stand in the document."""
    kinds = {tensor: f"{tensor.type}{'[]' if tensor.dims == t.ANY else ''}" for tensor in tensors}
    return [f"| `{tensor.name}` | {kind} | {tensor.meaning} |" for tensor, kind in kinds.items()]


def test_every_tensor_is_shown_as_it_is() -> None:
    shown = DOCS.read_text(encoding="utf-8").splitlines()
    inputs, outputs = rows((*t.ENSEMBLE.inputs, t.INPUT_IDS, t.PREFIX)), rows(t.DFLOW.outputs)
    wanted = [*inputs, *outputs]
    assert [line for line in wanted if line not in shown] == []
    assert [line for line in shown if line.startswith("| `") and line.count(" | ") == 2 and line not in wanted] == []
