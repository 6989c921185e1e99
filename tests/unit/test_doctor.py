"""`dflow-trt doctor`: what is found, what is missing, what to do; and the self-test's verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakegpu
import numpy as np
import pytest
from fakegpu.bundles import VOCAB, tiny_bundle

from dflow_trt.bundle import Bundle
from dflow_trt.doctor import examine, show
from dflow_trt.doctor.examine import Finding, backends
from dflow_trt.doctor.selftest import Parity, compare, lossless
from dflow_trt.runtime.base import Array
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.runtime.trt import TrtRuntime


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    """This machine's, whatever it has."""
    return {finding.name: finding for finding in examine.examine()}


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflow_trt", "doctor", *arguments]
    environment = {**os.environ, "COLUMNS": "200", **environment}  # a narrow table would break the words
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# -- looking -----------------------------------------------------------------------------------------------------------


def test_the_cpu_path_works_here_and_whatever_is_missing_has_a_fix(findings: dict[str, Finding]) -> None:
    assert show.works_on_cpu(list(findings.values()))
    assert list(findings)[:3] == ["Python", "Python packages", "glibc"]
    packages = findings["Python packages"].found
    assert all(f"{name} " in packages for name in ("numpy", "onnx", "onnxruntime", "tokenizers", "click"))
    for finding in findings.values():
        assert bool(finding.fix) == (finding.state != "ok" and finding.serves != "-"), finding
        assert "\n" not in finding.fix


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_without_a_gpu_its_findings_say_what_to_install(findings: dict[str, Finding]) -> None:
    assert findings["NVIDIA driver"].state == findings["CUDA"].state == "missing"
    assert "ubuntu-drivers install" in findings["NVIDIA driver"].fix
    assert backends(list(findings.values())) == []


def test_the_command_prints_a_table_or_json_and_exits_with_0() -> None:
    table = doctor()
    assert table.returncode == 0, table.stderr
    assert "the CPU path works" in table.stdout
    assert "onnxruntime" in table.stdout
    data = json.loads(doctor("--json").stdout)
    assert data["cpu_path"] is True
    assert {finding["name"] for finding in data["findings"]} >= {
        "Python",
        "TensorRT",
        "dflow:: plugin",
        "Triton server",
    }


def test_a_package_that_does_not_load_fails_the_command(tmp_path: Path) -> None:
    """A wheel for another machine, say: it is installed, and importing it raises."""
    (tmp_path / "safetensors.py").write_text("raise OSError('wrong ELF class')")
    broken = doctor(PYTHONPATH=str(tmp_path))
    assert broken.returncode == 1
    assert "safetensors: wrong ELF class" in broken.stdout
    assert "pip install --force-reinstall . in the checkout" in broken.stdout
    assert broken.stderr.startswith("error: doctor: the CPU path does not work here")


def test_the_plugin_is_loaded_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a registry that lacks one plugin, by one that has all, by one that crashes as TensorRT may without a GPU."""
    library = tmp_path / "libdflow_plugins.so"
    library.write_bytes(b"")
    monkeypatch.setenv("DFLOW_TRT_PLUGIN", str(library))
    (tmp_path / "tensorrt.py").write_text(FAKE_REGISTRY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KNOWN", "HiddenStateExtract")
    found = examine._plugin(["tensorrt"])
    assert (found.state, found.found) == ("broken", f"{library}: HiddenStateExtract in tensorrt")
    assert found.fix == "bash build_scripts/build_plugins.sh --fetch-toolchain build/toolchain"
    monkeypatch.setenv("KNOWN", "HiddenStateExtract RelayInject")
    assert examine._plugin(["tensorrt"]).state == "ok"
    monkeypatch.setenv("KNOWN", "crash")
    assert examine._plugin(["tensorrt"]).found == f"{library}: crashed (SIGSEGV) in tensorrt"
    assert examine._plugin([]).found == f"{library}, no TensorRT to load it into"


FAKE_REGISTRY = """
import os
__version__ = "99.1"

class Registry:
    def load_library(self, path):
        if os.environ["KNOWN"] == "crash":
            os.kill(os.getpid(), 11)

    def get_creator(self, name, version, domain):
        return name if name in os.environ["KNOWN"].split() else None

def get_plugin_registry():
    return Registry()
"""


def test_a_tensorrt_without_its_libraries_is_broken_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = examine._tensorrt("tensorrt", *examine._import("tensorrt"))
    assert found.state == "broken"
    assert found.found.endswith("libnvinfer.so.11: cannot open shared object file")
    assert found.fix == "pip install '.[tensorrt]' in the checkout"


def test_a_library_that_was_never_built_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLOW_TRT_PLUGIN", str(tmp_path / "nothing.so"))
    found = examine._plugin(["tensorrt"])
    assert (found.state, found.found) == ("missing", f"no {tmp_path / 'nothing.so'}")


def test_triton_is_found_in_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    number = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = tmp_path / "pytriton" / "tritonserver"
    for path in (
        server / "bin" / "tritonserver",
        server / "python_backend_stubs" / number / "triton_python_backend_stub",
    ):
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "pytriton" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine._triton_server().found == str(server / "bin" / "tritonserver")
    assert examine._triton_stub().state == "ok"


@pytest.mark.parametrize(
    ("answer", "state", "fix"),
    [
        ("glibc 2.36", "ok", ""),
        ("glibc 2.27", "missing", "use a system with glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8)"),
        (None, "missing", "use a system with glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8)"),
    ],
)
def test_an_old_c_library_is_named(monkeypatch: pytest.MonkeyPatch, answer: str | None, state: str, fix: str) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: answer)
    found = examine._glibc()
    assert (found.state, found.fix) == (state, fix)


def test_a_backend_can_be_tried_where_its_tensorrt_and_a_gpu_are() -> None:
    fine = [Finding(name, "GPU", "ok", "") for name in ("CUDA", "TensorRT-RTX")]
    assert backends(fine) == ["tensorrt-rtx"]
    assert backends([*fine, Finding("TensorRT", "GPU", "ok", "")]) == ["tensorrt", "tensorrt-rtx"]
    assert backends(fine[1:]) == []


# -- trying ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(scope="module")
def reference(bundle: Bundle) -> Iterator[OrtRuntime]:
    with closing(OrtRuntime(bundle, threads=1)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, length).tolist() for length in (3, 17, 40, 8)]


class Wrong:
    """A runtime whose target errs at one position of each sequence: by its second best choice, or by its worst."""

    def __init__(self, inner: OrtRuntime, rank: int, position: int = 45) -> None:
        self.inner, self.rank, self.position = inner, rank, position

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str] = ()
    ) -> list[Array]:
        if engine != "target" or not fetch:
            return self.inner.run(engine, drafter, slots, feeds, fetch)
        ids, logits = self.inner.run(engine, drafter, slots, feeds, ("next_ids", "logits"))
        for i, r in np.ndindex(ids.shape):
            if feeds["position_ids"][i, feeds["logit_rows"][i, r]] == self.position:
                ids[i, r] = np.argsort(-logits[i, r, :VOCAB])[self.rank]
        return [{"next_ids": ids, "logits": logits}[name] for name in fetch]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_lossless_runtime_passes_and_one_that_errs_is_to_be_reported(
    bundle: Bundle, reference: OrtRuntime, prompts: list[list[int]]
) -> None:
    fine = lossless(bundle, reference, prompts)
    assert (fine.state, fine.found) == ("ok", "24 of 24 sequences with drafts are those of plain decoding")
    rows = SimpleNamespace(calls=0)

    class Odd(Wrong):  # errs in passes of several rows alone: verifying, not plain decoding
        def run(self, *arguments: Any, **options: Any) -> list[Array]:
            rows.calls += 1
            feeds = arguments[3]
            plain = "input_ids" not in feeds or feeds["input_ids"].shape[1] == 1
            return self.inner.run(*arguments, **options) if plain else super().run(*arguments, **options)

    wrong = lossless(bundle, Odd(reference, 1), prompts)
    assert wrong.state == "broken"
    assert wrong.fix == "please report this"


@pytest.mark.parametrize("strategy", ["ar", "dflow"])
def test_a_runtime_that_gives_the_same_tokens_is_on_a_par(
    bundle: Bundle, reference: OrtRuntime, prompts: list[list[int]], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = fakegpu.Gpu()
    fakegpu.install(monkeypatch, gpu)
    offered = fakegpu.offer(gpu, bundle)
    with closing(TrtRuntime(offered)) as on_gpu:
        parity = compare((bundle, reference), (offered, on_gpu), prompts, strategy)
    assert parity == Parity(4, 4, (), 1e-3)
    assert parity.ok
    assert str(parity) == "4 of 4 sequences equal"


def test_a_difference_is_measured_by_the_references_logits(
    bundle: Bundle, reference: OrtRuntime, prompts: list[list[int]]
) -> None:
    """The second best at position 45 of every sequence: the gap between the two decides, not how it goes on."""
    parity = compare((bundle, reference), (bundle, Wrong(reference, 1)), prompts, "ar")
    assert parity.same == 0
    assert len(parity.gaps) == 4
    assert all(0 < gap < 3 for gap in parity.gaps)
    assert not parity.ok, "in float32 that is no near tie"
    assert str(parity).startswith("0 of 4 sequences equal, 0 of 4 differences are near ties, the widest gap is ")
    in_sixteen_bits = Parity(4, 0, parity.gaps, bound=3.0)
    assert in_sixteen_bits.ok


def test_a_token_far_down_the_ranking_is_never_a_near_tie(
    bundle: Bundle, reference: OrtRuntime, prompts: list[list[int]]
) -> None:
    parity = compare((bundle, reference), (bundle, Wrong(reference, VOCAB - 1)), prompts, "ar")
    assert parity.gaps == (float("inf"),) * 4
    assert not parity.ok
