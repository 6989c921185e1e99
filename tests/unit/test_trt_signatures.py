"""The fake accepts what the real bindings accept, and nothing else."""

from __future__ import annotations

import enum
from typing import Any

import fakegpu
import pytest
from fakegpu.cuda import make_cuda
from fakegpu.signatures import RECORDED, accepts, checked, parameters
from fakegpu.tensorrt import make_tensorrt

RUNTIME_CLASSES = ("Runtime", "ICudaEngine", "IExecutionContext", "IPluginRegistry", "ILogger")


@pytest.mark.parametrize("version", fakegpu.VERSIONS)
def test_the_fake_has_no_member_that_these_bindings_lack(version: str) -> None:
    """make_tensorrt asserts it of every class, method and property."""
    label = fakegpu.VERSIONS[version]
    module: Any = make_tensorrt(fakegpu.Gpu(), label, label.split()[1])
    for name in RUNTIME_CLASSES:
        assert hasattr(module, name)
    assert module.ExecutionContextAllocationStrategy.USER_MANAGED in module.ExecutionContextAllocationStrategy


@pytest.mark.parametrize("version", ["11.4.0.106", "10.16.1.11"])
def test_the_lean_bindings_have_the_same_classes_for_running_engines(version: str) -> None:
    lean = RECORDED[f"tensorrt_lean {version}"]
    assert not set(RUNTIME_CLASSES) & set(lean["missing_classes"])
    assert set(lean["other_signatures"]) == {"ICudaEngine.create_engine_inspector"}, "which the runtime does not call"
    assert {"Builder", "OnnxParser", "INetworkDefinition"} <= set(lean["missing_classes"])


SIGNATURE = "(name: str, shape: tuple) -> bool"
STRATEGY = "(strategy: ExecutionContextAllocationStrategy = <STATIC: 0>) -> IExecutionContext"


class ExecutionContextAllocationStrategy(enum.Enum):
    USER_MANAGED = 2


@pytest.mark.parametrize(
    ("signature", "arguments", "fits"),
    [
        (SIGNATURE, ("x", (1, 2)), True),
        (SIGNATURE, ("x", [1, 2]), False),
        (SIGNATURE, ("x",), False),
        (SIGNATURE, ("x", (1,), 0), False),
        (SIGNATURE, (b"x", (1,)), False),
        (STRATEGY, (), True),
        (STRATEGY, (ExecutionContextAllocationStrategy.USER_MANAGED,), True),
        (STRATEGY, (2,), False),
        ("(memory: SupportsInt, size: SupportsInt) -> None", (1 << 40, 5), True),
        ("(memory: SupportsInt, size: SupportsInt) -> None", (1.5, 5), False),
        ("(memory: SupportsInt, size: SupportsInt) -> None", (True, 5), False),
        ("(serialized_engine: Buffer) -> ICudaEngine", (b"engine",), True),
        ("(serialized_engine: Buffer) -> ICudaEngine", ("engine",), False),
    ],
)
def test_arguments_are_held_against_a_signature(signature: str, arguments: tuple[Any, ...], fits: bool) -> None:
    assert accepts(signature, arguments) == fits


def test_a_signature_is_read_with_its_defaults() -> None:
    text = "(type: str, version: str, plugin_namespace: str = '') -> object"
    assert parameters(text) == [("type", "str", False), ("version", "str", False), ("plugin_namespace", "str", True)]
    assert parameters("() -> IPluginRegistry") == []


def test_a_fake_member_that_does_not_exist_is_refused() -> None:
    class IExecutionContext:
        def execute_async_v4(self, stream: int) -> bool:
            return True

    with pytest.raises(AssertionError, match="the real IExecutionContext has no execute_async_v4"):
        checked(IExecutionContext, RECORDED["tensorrt 11.4.0.106"]["classes"]["IExecutionContext"])


def test_a_call_with_wrong_arguments_fails_where_it_is_made() -> None:
    cuda: Any = make_cuda(fakegpu.Gpu())
    for wrong in ((1.5,), ("16",), (-1,), (16, 0), ()):
        with pytest.raises(AssertionError, match="cudaMalloc"):
            cuda.cudaMalloc(*wrong)
    with pytest.raises(AssertionError, match="kind"):
        cuda.cudaMemcpyAsync(0, 0, 1, 1, None)
