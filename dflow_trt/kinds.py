"""The kinds of drafters: one line each. What a bundle, a build and a decoder know of a drafter, they look up here.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dflow_trt import contract as c
from dflow_trt.spec import BuildSpec, DFlashSpec, DraftModelSpec, DrafterSpec, Eagle3Spec, NgramSpec, TargetSpec

Contracts = Callable[[Any, TargetSpec, tuple[int, ...], int, BuildSpec], tuple[c.EngineContract, ...]]


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    spec: its dataclass. architectures: what config.json calls it. contracts(spec, target, taps, cache_rows, build): its
    engines. drafting, graphs: the modules of the decoder's side and of the build's, loaded when they are wanted.
    """

    spec: type[DrafterSpec]
    architectures: tuple[str, ...]
    contracts: Contracts
    drafting: str
    graphs: str

    def drafting_module(self) -> Any:
        """See :class:`dflow_trt.drafting.base.Drafting`; the class is called ``Drafting`` there too."""
        return import_module(self.drafting)

    def graphs_module(self) -> Any:
        """See :mod:`dflow_trt.graphs`."""
        return import_module(self.graphs)


def _kind(spec: type[DrafterSpec], architectures: tuple[str, ...], contracts: Contracts) -> Kind:
    module = spec.kind.replace("-", "_")
    return Kind(spec, architectures, contracts, f"dflow_trt.drafting.{module}", f"dflow_trt.graphs.{module}")


KINDS: dict[str, Kind] = {
    kind.spec.kind: kind
    for kind in (
        _kind(DFlashSpec, ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator"), c.dflash_contracts),
        _kind(
            Eagle3Spec,
            ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
            c.eagle3_contracts,
        ),
        _kind(DraftModelSpec, ("Qwen3ForCausalLM",), c.draft_model_contracts),
        _kind(NgramSpec, (), c.ngram_contracts),
    )
}
