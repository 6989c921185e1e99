"""The kinds of drafters: one line each. What a bundle, a build and a decoder know of a drafter, they look up here.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dflow_trt import contract as c
from dflow_trt.spec import BuildSpec, DFlashSpec, DrafterSpec, DraftModelSpec, Eagle3Spec, NgramSpec, TargetSpec

Contracts = Callable[[Any, TargetSpec, tuple[int, ...], int, BuildSpec], tuple[c.EngineContract, ...]]


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    spec: its dataclass. architectures: what config.json calls it. contracts(spec, target, taps, cache_rows, build): its
    engines. drafting, graphs, check: the modules of the decoder's side, of the build's and of the self-check's, loaded
    when they are wanted.
    """

    spec: type[DrafterSpec]
    architectures: tuple[str, ...]
    contracts: Contracts
    drafting: str
    graphs: str
    check: str

    def drafting_module(self) -> Any:
        """See :class:`dflow_trt.drafting.base.Drafting`; the class is called ``Drafting`` there too."""
        return import_module(self.drafting)

    def graphs_module(self) -> Any:
        """See :mod:`dflow_trt.graphs.kind`."""
        return import_module(self.graphs)

    def check_module(self) -> Any:
        """See :mod:`dflow_trt.selfcheck`."""
        return import_module(self.check)


def _kind(spec: type[DrafterSpec], architectures: tuple[str, ...], contracts: Contracts) -> Kind:
    name = spec.kind.replace("-", "_")
    modules = (f"dflow_trt.{side}.{name}" for side in ("drafting", "graphs", "selfcheck"))
    return Kind(spec, architectures, contracts, *modules)


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
