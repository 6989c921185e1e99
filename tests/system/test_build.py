"""`dflow-trt build` from outside: whole or not at all, its room on disk and in memory, and whom it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import make_drafter, make_target

from dflow_trt import build as building
from dflow_trt.api import LLM
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle, estimate_bytes
from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.checkpoint.drafter import read_drafter
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.graphs import dflash
from dflow_trt.method.sampling import SamplingParams

sys.path.append(str(Path(__file__).parents[2] / "build_scripts"))
import bench_build

MAIN = "from dflow_trt.cli import main; main()"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, flash (taps 1, 0), flow (taps 0, 2) and another target of the same shape."""
    folder = tmp_path_factory.mktemp("models")
    config = make_target(folder / "target", tokenizer=250, num_hidden_layers=4)
    make_drafter(folder / "flash", config, taps=(1, 0), seed=2)
    make_drafter(folder / "flow", config, relay=True, taps=(0, 2), block_size=4)
    make_target(folder / "other", tokenizer=250, seed=9)
    return folder


def run(models: Path, output: Path, *drafters: str, target: str = "target", **settings: Any) -> Bundle:
    sources = [DrafterSource(models / name) for name in drafters]
    keep = {name: settings.pop(name) for name in ("force", "self_check", "report") if name in settings}
    keep = {"self_check": "off", **keep}
    return build_bundle(models / target, sources, output, BuildOptions(**settings), **keep)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden entries too."""
    return sorted(os.listdir(folder))


# -- what is built -----------------------------------------------------------------------------------------------------


def test_two_drafters_with_other_taps_share_a_bundle(models: Path, tmp_path: Path) -> None:
    bundle = run(models, tmp_path / "bundle", "flash", "flow", self_check="full")
    assert bundle.taps == (1, 0, 2)
    assert list(bundle.strategies) == ["ar", "dflash", "dflow", "dflow-norelay"]
    assert bundle.verify_rows == 8
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(bundle, threads=1) as llm:
        texts = {name: llm.generate("w1 w2 w3", params, strategy=name)[0].token_ids for name in bundle.strategies}
    assert len(set(texts.values())) == 1, texts
    assert names(tmp_path) == ["bundle"]


def test_a_shifted_head_takes_a_row_more_than_its_block(models: Path, tmp_path: Path) -> None:
    """A verify pass of nine rows for a block of eight; the margin of the caches is just used up at the last token."""
    config = json.loads((models / "target" / "config.json").read_text())
    make_drafter(tmp_path / "shifted", config, domino={"shift_label": True})
    source = [DrafterSource(tmp_path / "shifted")]
    with pytest.raises(UserError, match=r"--max-num-tokens: 64; allowed: 72 to 1048576 \(max_batch_size 8 x 9 rows of"):
        build_bundle(models / "target", source, tmp_path / "bundle", BuildOptions(max_num_tokens=64))
    options = BuildOptions(max_seq_len=120, max_input_len=4, max_num_tokens=72)
    bundle = build_bundle(models / "target", source, tmp_path / "bundle", options)
    assert (bundle.verify_rows, bundle.cache_rows) == (9, 192)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with LLM(bundle, threads=1) as llm:
        wanted, found = (llm.generate("w1 w2 w3 w4", params, strategy=name)[0] for name in ("ar", "domino"))
    assert found.token_ids == wanted.token_ids
    assert len(found.token_ids) == 116


def test_a_second_build_is_byte_equal(models: Path, tmp_path: Path) -> None:
    run(models, tmp_path / "a", "flow")
    run(models, tmp_path / "b", "flow")
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    for found in (first, second):
        manifest = json.loads(found.pop("dflow.json"))
        assert manifest["built_with"].pop("date")
        assert manifest.pop("seal"), "which covers the date, too"
        found["manifest"] = json.dumps(manifest).encode()
    assert first == second


def test_files_are_readable_as_the_umask_says(models: Path, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        run(models, tmp_path / "bundle")
    finally:
        os.umask(old)
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "bundle" / "target.onnx").stat().st_mode & 0o777 == 0o644


def test_missing_parents_are_made(models: Path, tmp_path: Path) -> None:
    assert run(models, tmp_path / "a" / "b" / "bundle").path == tmp_path / "a" / "b" / "bundle"


def test_a_target_without_tokenizer_takes_token_ids_alone(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "target", tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").unlink()
    bundle = build_bundle(tmp_path / "target", [], tmp_path / "bundle", BuildOptions(), self_check="layer")
    assert bundle.tokenizer_path is None
    with LLM(bundle, threads=1) as llm:
        with pytest.raises(UserError, match="no tokenizer; give prompt_token_ids"):
            llm.generate("w1 w2")
        output = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert len(output.token_ids) == 5
    assert output.text == ""


class Recorder:
    """A report that remembers."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.written, self.notes = 0, []

    def stage(self, name: str, total_bytes: int | None) -> None:
        self.stages.append((name, total_bytes))

    def advance(self, num_bytes: int) -> None:
        self.written += num_bytes

    def note(self, line: str) -> None:
        self.notes.append(line)


def test_progress_ends_near_the_estimate(models: Path, tmp_path: Path) -> None:
    report = Recorder()
    run(models, tmp_path / "bundle", "flash", "flow", report=report, self_check="full")
    (first, estimate), (second, total) = report.stages
    assert (first, second, total) == ("weights", "self-check", None)
    assert estimate is not None
    assert 0.6 * estimate <= report.written <= estimate  # graphs are small and come at once
    assert len(report.notes) == 1
    assert "memory" in report.notes[0]


# -- room on disk ------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 4000}
ESTIMATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied": (WIDE, {}),
    "tied": ({**WIDE, "tied": True}, {}),
    "tied bf16": ({**WIDE, "tied": True, "dtype": "bfloat16"}, {}),
    "untied bf16": ({**WIDE, "dtype": "bfloat16"}, {}),
    "int8 target": ({**WIDE, "tied": True}, {"target_weights": "int8"}),
    "int8 untied": ({**WIDE, "dtype": "bfloat16"}, {"target_weights": "int8"}),
    "float drafter": ({**WIDE, "attention_bias": True}, {"draft_weights": "float"}),
    "large vocabulary": ({"vocab_size": 60_000, "tied": True, "dtype": "bfloat16"}, {}),
    "many layers": ({"num_hidden_layers": 24}, {}),
    "padded vocabulary": ({**WIDE, "tokenizer": 3900}, {}),
}


DRAFTED: dict[str, dict[str, Any] | None] = {
    "drafted": {"relay": True},
    "with a causal head": {"domino": {"shift_label": True}, "block_size": 16},
    "with convolutions": {"dflash2": {"conv_kernel_size": 16}, "block_size": 16},
    "alone": None,
}


@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("name", ESTIMATES)
def test_the_estimate_is_a_close_upper_bound(tmp_path: Path, name: str, drafted: str) -> None:
    (settings, options), keys = ESTIMATES[name], DRAFTED[drafted]
    config = make_target(tmp_path / "target", **settings)
    if keys is not None:
        make_drafter(tmp_path / "drafter", config, **keys)
    bundle = run(tmp_path, tmp_path / "bundle", *(["drafter"] if keys is not None else []), **options)
    target = read_target(tmp_path / "target")
    drafts = [read_drafter(tmp_path / "drafter", target.spec)] if keys is not None else []
    estimate = estimate_bytes(target, drafts, bundle.build)
    written = sum(entry.size for entry in bundle.files.values())
    assert written <= estimate <= 1.6 * written, estimate / written


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_estimate_counts_a_draft_model_and_its_tables(tmp_path: Path, tied: bool, form: Any) -> None:
    make_target(tmp_path / "target", **WIDE)
    make_target(tmp_path / "small", **{**WIDE, "hidden_size": 128}, num_hidden_layers=1, tied=tied)
    sources = [DrafterSource(tmp_path / "small"), DrafterSource(Path("ngram"))]
    options = BuildOptions(draft_weights=form)
    bundle = build_bundle(tmp_path / "target", sources, tmp_path / "bundle", options, self_check="off")
    target = read_target(tmp_path / "target")
    estimate = estimate_bytes(target, building.read_drafters(sources, target), bundle.build)
    written = sum(entry.size for entry in bundle.files.values())
    assert written <= estimate <= 1.6 * written, estimate / written


def test_too_little_disk_is_said_before_anything_is_written(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(0, 0, 12_300_000))
    with pytest.raises(UserError, match=r"has 12\.3 MB free, the build needs \d+\.\d MB; free some space") as caught:
        run(models, tmp_path / "new" / "bundle")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 70 MB; needs the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=70m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_small_disk_is_refused(models: Path, tmp_path: Path, small_disk: Path) -> None:
    run(models, small_disk / "fits", "flow")
    config = make_target(tmp_path / "wide", vocab_size=60_000)
    make_drafter(tmp_path / "draft", config)
    with pytest.raises(UserError, match="free some space"):
        run(tmp_path, small_disk / "bundle", "draft", target="wide")
    assert names(small_disk) == ["fits"]


def test_a_disk_that_fills_up_meanwhile(
    models: Path, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_target(tmp_path / "wide", vocab_size=200_000)
    monkeypatch.setattr(building, "_check_disk", lambda *rest: None)
    with pytest.raises(UserError, match=r"No space left on device; nothing was built$"):
        run(tmp_path, small_disk / "bundle", target="wide")
    assert names(small_disk) == []


def test_a_write_that_fails_is_one_line_and_leaves_nothing(models: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)); "
    done = subprocess.run(
        [sys.executable, "-c", limit + MAIN, *arguments(models, tmp_path / "bundle")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("File too large; nothing was built")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert names(tmp_path) == []


# -- whole or not at all -----------------------------------------------------------------------------------------------


def arguments(models: Path, output: Path, *more: str) -> list[str]:
    given = ["--target", str(models / "target"), "--drafter", str(models / "flow"), "--output", str(output)]
    return ["build", *given, *more]


# Stops for good at a point of a real build, and says so.
PAUSE = """
import sys, time
from dflow_trt import build, console
def pause(*rest, **more):
    print("paused", flush=True)
    time.sleep(600)
where = sys.argv.pop(1)
if where == "weights":
    written = [0]
    def advance(self, count):
        written[0] += count
        if written[0] > 300_000:
            pause()
    console.BuildProgress.advance = advance
elif where == "check":
    build.run_self_check = pause
else:
    build._put_in_place = pause
"""


def start(where: str, models: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    """A build that has come to ``where`` and waits there."""
    command = [sys.executable, "-c", PAUSE + MAIN, where, *arguments(models, output, *more)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "paused\n", process.communicate()
    return process


@pytest.mark.parametrize(
    ("where", "replacing"), [("weights", True), ("check", False), ("rename", True)], ids=["weights", "check", "rename"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_builds_leave_nothing(
    models: Path, tmp_path: Path, number: signal.Signals, where: str, replacing: bool
) -> None:
    output, before = tmp_path / "bundle", []
    if replacing:
        run(models, output, "flash")
        before = ["bundle"]
    old = contents(output)
    process = start(where, models, output, *(["--force"] if replacing else []))
    assert len(names(tmp_path)) == len(before) + 1  # the build at work
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert len(names(tmp_path)) == len(before) + 1  # nobody could clean up
    else:
        assert process.returncode == 130
        assert stderr.strip() == "interrupted"
        assert names(tmp_path) == before
    assert contents(output) == old
    bundle = run(models, output, "flow", force=replacing)
    assert list(bundle.drafters) == ["dflow"]
    assert names(tmp_path) == ["bundle"]


def test_a_build_killed_between_its_renames_gives_the_old_bundle_back(models: Path, tmp_path: Path) -> None:
    run(models, tmp_path / "bundle", "flash")
    old = contents(tmp_path / "bundle")
    (tmp_path / "bundle").rename(tmp_path / f".bundle.building-dead{building.OLD}")
    (tmp_path / ".bundle.building-dead").mkdir()
    with pytest.raises(UserError, match="holds a bundle already"):
        run(models, tmp_path / "bundle", "flow")
    assert contents(tmp_path / "bundle") == old
    assert names(tmp_path) == ["bundle"]


def test_leftovers_of_others_are_left_alone(models: Path, tmp_path: Path) -> None:
    kept = [".bundle2.building-x", "bundle.building-x", ".bundle"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".bundle [1].building-x").mkdir()
    run(models, tmp_path / "bundle")
    run(models, tmp_path / "bundle [1]")
    assert names(tmp_path) == sorted([*kept, "bundle", "bundle [1]"])


@pytest.mark.parametrize("step", ["run_self_check", "write_manifest", "_put_in_place", "build_drafter"])
@pytest.mark.parametrize(
    "error", [UserError("no"), OSError(5, "Input/output error"), RuntimeError("bug"), MemoryError()]
)
def test_a_failing_rebuild_keeps_the_old_bundle(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    run(models, tmp_path / "bundle", "flash")
    old = contents(tmp_path / "bundle")

    def fail(*rest: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(dflash if step == "build_drafter" else building, step, fail)
    with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
        run(models, tmp_path / "bundle", "flow", force=True)
    assert contents(tmp_path / "bundle") == old
    assert names(tmp_path) == ["bundle"]


def test_a_failing_rename_puts_the_old_bundle_back(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(models, tmp_path / "bundle", "flash")
    old, rename = contents(tmp_path / "bundle"), Path.rename

    def fail(self: Path, to: Path) -> Path:
        if ".building-" in self.name and not self.name.endswith(building.OLD):
            raise OSError(5, "Input/output error", str(self))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match="Input/output error; nothing was built"):
        run(models, tmp_path / "bundle", "flow", force=True)
    assert contents(tmp_path / "bundle") == old
    assert names(tmp_path) == ["bundle"]


def test_a_bundle_is_replaced_only_with_force(models: Path, tmp_path: Path) -> None:
    run(models, tmp_path / "bundle", "flash")
    old = contents(tmp_path / "bundle")
    with pytest.raises(UserError, match="holds a bundle already; give --force"):
        run(models, tmp_path / "bundle", "flow")
    assert contents(tmp_path / "bundle") == old
    assert list(run(models, tmp_path / "bundle", "flow", force=True).drafters) == ["dflow"]
    assert not [name for name in names(tmp_path / "bundle") if name.startswith("dflash")]


@pytest.mark.parametrize("force", [True, False])
def test_other_folders_and_files_are_never_overwritten(models: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is not empty and no bundle"):
        run(models, tmp_path / "thesis", force=force)
    with pytest.raises(UserError, match="is a file"):
        run(models, tmp_path / "file", force=force)
    assert contents(tmp_path) == {"thesis/chapter.txt": b"years of work", "file": b"x"}


def test_force_never_removes_what_is_no_part_of_a_bundle(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    run(models, output)
    shutil.copytree(models / "target", output / "target")
    before = contents(output)
    with pytest.raises(UserError, match="also holds 'target'"):
        build_bundle(output / "target", [], output, BuildOptions(), force=True, self_check="off")
    assert contents(output) == before


def test_an_empty_folder_is_filled(models: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    run(models, tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]


def test_a_link_is_followed_not_replaced(models: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "bundle")
    run(models, tmp_path / "link", "flash")
    run(models, tmp_path / "link", "flow", force=True)
    assert (tmp_path / "link").is_symlink()
    assert list(open_bundle(tmp_path / "link").drafters) == ["dflow"]
    assert names(tmp_path / "disk") == ["bundle"]


def test_a_place_that_cannot_be_written_is_one_line(models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="choose a folder that can be written") as caught:
        run(models, tmp_path / "file" / "bundle")
    assert "\n" not in str(caught.value)


def test_repeated_drafter_names_are_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two drafters are called 'dflow'"):
        run(models, tmp_path / "bundle", "flow", "flow")
    sources = [DrafterSource(models / "flow"), DrafterSource(models / "flow", "again")]
    bundle = build_bundle(models / "target", sources, tmp_path / "bundle", BuildOptions(), self_check="off")
    assert list(bundle.drafters) == ["dflow", "again"]


# -- at the same time --------------------------------------------------------------------------------------------------


def test_a_second_build_into_the_same_output_is_refused(models: Path, tmp_path: Path) -> None:
    process = start("check", models, tmp_path / "bundle")
    try:
        with pytest.raises(UserError, match=r"another build into .* is running; wait for it"):
            run(models, tmp_path / "bundle", "flash")
        run(models, tmp_path / "elsewhere", "flash")  # another output is nobody's business
    finally:
        process.kill()
        process.communicate()


def test_an_output_that_another_build_filled_meanwhile_is_not_replaced(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds that began in the same moment do not see each other before the end."""
    original = building.run_self_check

    def meanwhile(*rest: Any) -> Any:
        monkeypatch.setattr(building, "run_self_check", original)
        shutil.copytree(tmp_path / "other", tmp_path / "bundle")
        return original(*rest)

    run(models, tmp_path / "other", "flash")
    monkeypatch.setattr(building, "run_self_check", meanwhile)
    with pytest.raises(UserError, match="was filled by another build meanwhile; nothing was replaced"):
        run(models, tmp_path / "bundle", "flow")
    assert contents(tmp_path / "bundle") == contents(tmp_path / "other")
    assert names(tmp_path) == ["bundle", "other"]


def test_builds_at_the_same_time_leave_one_whole_bundle(models: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAIN, *arguments(models, tmp_path / "bundle", "--force", "--self-check", "off")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert 0 in [code for _, code in results]
    for stderr, code in results:
        assert code in (0, 1)
        assert code == 0 or stderr.startswith("error: --output: "), stderr
        assert "Traceback" not in stderr
    assert list(open_bundle(tmp_path / "bundle").drafters) == ["dflow"]
    assert names(tmp_path) == ["bundle"]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_stays_near_twice_the_largest_tensor(tmp_path: Path) -> None:
    """A vocabulary of real size, and a bound that is tighter in the same measure: 300 MB plus twice the largest."""
    row = bench_build.bench("small", ["default"], tmp_path)[0]
    largest = 151936 * 512 * 2
    assert row["bound_bytes"] == 600_000_000 + 2 * largest
    assert 2 * largest < row["peak_bytes"] <= 300_000_000 + 2 * largest
    assert row["bytes"] > 400_000_000
    assert names(tmp_path) == []


@pytest.mark.slow
def test_memory_of_a_model_of_real_size(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    if free < 12_000_000_000:
        pytest.skip(f"needs 12 GB of disk, {free / 1e9:.0f} GB are free")
    for row in bench_build.bench("0.6b", ["default", "int8"], tmp_path):
        assert row["peak_bytes"] <= row["bound_bytes"], row
    assert names(tmp_path) == []


def test_the_watched_memory_is_that_of_the_process() -> None:
    """The measure itself: a process that holds 200 MB for a moment is seen to."""
    code = "import time; x = bytearray(200_000_000); del x; time.sleep(0.3)"
    process = subprocess.Popen([sys.executable, "-c", code])
    with bench_build.PeakMemory(process.pid) as peak:
        process.wait()
        time.sleep(0.05)
    assert 200_000_000 < peak.resident < 260_000_000
