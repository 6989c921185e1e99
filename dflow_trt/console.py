"""What people see in a terminal: progress bars, tables, coloured text. Nothing here decides anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dflow_trt import contract as c
from dflow_trt.api import CompletionOutput, Prompt, RequestOutput
from dflow_trt.bundle import Bundle
from dflow_trt.graphs.kind import describe_stack
from dflow_trt.kinds import KINDS
from dflow_trt.memory import MemoryPlan, plan_memory, show_bytes
from dflow_trt.progress import ProgressBar
from dflow_trt.spec import DrafterSpec

if TYPE_CHECKING:
    from dflow_trt.plan import Fit, Plan

PLAIN_WIDTH = 200  # columns of a file or pipe: tables stay in one piece, and a line of text is a line
TEXT_WIDTH = 140  # of texts side by side
TEXT_LINES, TEXT_PROMPTS = 8, 3  # how much of them is shown


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


out, err = _console(), _console(stderr=True)


class BuildProgress(ProgressBar):
    """:class:`dflow_trt.build.Report` as a progress bar on standard error."""

    def __init__(self) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn())
        super().__init__(err, *columns, TimeElapsedColumn(), transient=True)

    def stage(self, name: str, total_bytes: int | None) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        assert self._task is not None, "within a stage"
        self._bar.advance(self._task, num_bytes)

    def note(self, line: str) -> None:
        self.say(line)


def drafter_line(spec: DrafterSpec) -> str:
    """What a drafter is, in a line."""
    line: str = KINDS[spec.kind].graphs_module().describe(spec)
    return line


def memory_line(plan: MemoryPlan) -> str:
    """The memory plan in one line."""
    caches = f"KV {show_bytes(plan.target_cache)} + {show_bytes(plan.drafter_cache)} for {plan.slots} slots"
    rest = f"state, outputs and workspace {show_bytes(plan.relay_state + plan.outputs + plan.workspace)}"
    return f"weights {show_bytes(plan.weights)}, {caches}, {rest}: {show_bytes(plan.total)} in all"


def _say(line: str) -> None:
    """A line of text: the terminal may wrap it, a file gets it whole."""
    out.print(line, soft_wrap=True)


def show_built(bundle: Bundle, seconds: float) -> None:
    """The closing lines of a build."""
    size = sum(entry.size for entry in bundle.files.values())
    strategies = ", ".join(bundle.strategies)
    _say(f"[bold]{escape(str(bundle.path))}[/]: {show_bytes(size)} in {len(bundle.files)} files, {seconds:.1f} s")
    _say(f"strategies: {strategies}")
    if bundle.engines:
        _say(f"engines: {_engines_line(bundle)}")
    _say(f"memory: {memory_line(plan_memory(bundle))}")
    _say(_check_line(bundle.self_check))


def _engines_line(bundle: Bundle) -> str:
    """What compiling took, and for what GPUs it was."""
    seconds = sum(entry.build_seconds for entry in bundle.engines.values())
    memory = max(entry.builder_memory for entry in bundle.engines.values())
    notes, plugins = bundle.built_with, sorted({name for entry in bundle.engines.values() for name in entry.plugins})
    inside = f"plugins {', '.join(plugins)}" if plugins else "no C++ plugins, the ONNX bodies of their nodes instead"
    gpus = f"{notes['gpu'] or 'GPUs'} of compute capability {notes['compute_capability']}"
    return f"compiled in {seconds:.0f} s and up to {show_bytes(memory)} of memory, for {gpus}; {inside}"


def _check_line(result: Mapping[str, Any]) -> str:
    errors = result.get("errors", {})
    worst = max(errors, key=errors.__getitem__, default=None)
    line = f"self-check: {result['mode']}"
    if worst is not None:
        found = f"{errors[worst]:.0e}, in {worst}"
        line += f", {len(errors)} sections match the numpy reference; largest difference {found}"
    if "engines" in result:
        line += f"; those of the graphs, the compiled engines were {result['engines']}"
    if "agreement" in result:
        line += f"; the quantised target agrees with the float model on {result['agreement']:.1%} of the sample text"
    return line


def show_bundle(bundle: Bundle) -> None:
    """`dflow-trt inspect`: specs, engines, tensors, files, licences, memory."""
    _say(f"[bold]{escape(str(bundle.path))}[/]  format {c.FORMAT_VERSION}, {bundle.build.backend} {bundle.build.dtype}")
    target = bundle.target
    _say(f"target   {describe_stack(target.stack, target.vocab_size)}; {target.live_vocab} live ids")
    _say(f"         licence: {escape(target.licence or 'not stated')}; fingerprint {bundle.target_fingerprint[:12]}")
    for name, entry in bundle.drafters.items():
        _say(f"drafter  [bold]{name}[/]: {drafter_line(entry.spec)}")
        if KINDS[entry.spec.kind].architectures:  # it has a checkpoint
            _say(
                f"         licence: {escape(entry.spec.licence or 'not stated')}; fingerprint {entry.fingerprint[:12]}"
            )
    build = bundle.build
    _say(
        f"limits   batch {build.max_batch_size}, input {build.max_input_len}, sequence {build.max_seq_len}, "
        f"tokens a pass {build.max_num_tokens}; weights: target {build.target_weights}, drafters {build.draft_weights}"
    )
    if bundle.engines:
        _say(f"engines  {_engines_line(bundle)}")
    _say(f"memory   {memory_line(plan_memory(bundle))}")
    out.print(_engine_table(bundle), _file_table(bundle))


def _engine_table(bundle: Bundle) -> Table:
    table = Table("engine", "inputs", "outputs", "caches", title="engines", title_justify="left")
    for name, contract in bundle.contracts():
        inputs = ", ".join(f"{spec.name}\\[{','.join(spec.dims)}]" for spec in contract.inputs)
        outputs = ", ".join(f"{spec.name}\\[{','.join(spec.dims)}]" for spec in contract.outputs)
        label = f"{name}.{contract.engine}" if name else contract.engine
        table.add_row(label, inputs, outputs, f"{contract.cache_layers} x k,v" if contract.cache_layers else "-")
    return table


def _file_table(bundle: Bundle) -> Table:
    table = Table("file", Column("size", justify="right"), "sha256", title="files", title_justify="left")
    for name, entry in sorted(bundle.files.items()):
        table.add_row(escape(name), show_bytes(entry.size), entry.sha256[:16])
    return table


@dataclass(frozen=True)
class StrategyRun:
    """All prompts generated with one strategy. same: token-equal to the baseline (None: nothing to compare with)."""

    strategy: str
    outputs: Sequence[RequestOutput]
    seconds: float
    same: int | None

    @property
    def figures(self) -> dict[str, Any]:
        """Totals over prompts and samples; the prefill token belongs to no round."""
        stats = [sample.stats for output in self.outputs for sample in output.outputs]
        rounds, tokens = sum(s.rounds for s in stats), sum(s.output_tokens for s in stats)
        emitted, accepted = sum(s.emitted for s in stats), sum(s.accepted for s in stats)
        return {
            "strategy": self.strategy,
            "sequences": len(stats),
            "output_tokens": tokens,
            "target_passes": sum(s.target_passes for s in stats),
            "rounds": rounds,
            "tau_accepted": accepted / rounds if rounds else 0.0,
            "tau_emitted": emitted / rounds if rounds else 0.0,
            "relayed_slots": sum(s.relayed_slots for s in stats),
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if self.seconds else 0.0,
            "same_as_ar": self.same,
        }


def show_runs(runs: Sequence[StrategyRun]) -> None:
    """The figures table: the first run is the baseline of the speed-up where there are several.

    tau: tokens a round; kept: drafts of them; passes: through the target; same: sequences token-equal to ar.
    """
    names = ("tokens", "passes", "tau", "kept", "tok/s", "speed-up", "same")
    table = Table("strategy", *(Column(name, justify="right", no_wrap=True) for name in names), box=box.SIMPLE_HEAD)
    base = runs[0].figures
    for run in runs:
        f = run.figures
        same = "-" if run.same is None else f"{run.same}/{f['sequences']}"
        speed = f["tokens_per_second"] / base["tokens_per_second"] if base["tokens_per_second"] else 0.0
        row = (f["output_tokens"], f["target_passes"], f"{f['tau_emitted']:.2f}", f"{f['tau_accepted']:.2f}")
        table.add_row(
            run.strategy,
            *map(str, row),
            f"{f['tokens_per_second']:.0f}",
            f"{speed:.2f}x" if len(runs) > 1 else "-",
            same,
        )
    out.print(table)


def show_comparison(baseline: StrategyRun, run: StrategyRun) -> None:
    """The first texts of two runs side by side, the baseline on the left."""
    columns = (Column(name, ratio=1, overflow="fold") for name in (baseline.strategy, run.strategy))
    table = Table(*columns, box=box.SIMPLE_HEAD, width=min(out.width, TEXT_WIDTH), show_lines=False)
    pairs = list(zip(baseline.outputs, run.outputs, strict=True))
    for i, (left, right) in enumerate(pairs[:TEXT_PROMPTS]):
        prompt = left.prompt if left.prompt is not None else f"prompt of {len(left.prompt_token_ids)} tokens"
        line = Text(" ".join(prompt.split()), style="dim", no_wrap=True, overflow="ellipsis")
        table.add_row(line, _verdict(left, right))
        table.add_row(_clipped(left), _clipped(right), end_section=i + 1 < min(len(pairs), TEXT_PROMPTS))
    out.print(table)
    if len(pairs) > TEXT_PROMPTS:
        out.print(f"  [dim]and {len(pairs) - TEXT_PROMPTS} more prompts; --json prints every text[/]")


def _verdict(left: RequestOutput, right: RequestOutput) -> Text:
    if left.token_ids != right.token_ids:
        return Text("other tokens than ar", style="bold red")
    stats = right.stats
    return Text(f"the same {stats.output_tokens} tokens in {stats.target_passes} target passes", style="green")


def _clipped(output: RequestOutput) -> Text:
    """The first sample's text, its first lines."""
    lines = _shown_text(output.outputs[0]).strip("\n").split("\n")
    text = "\n".join(lines[:TEXT_LINES])[: TEXT_LINES * TEXT_WIDTH // 2]
    return Text(text + (" …" if len(text) < len("\n".join(lines)) else ""))


def _shown_text(sample: CompletionOutput) -> str:
    """The text; token ids where there is no tokenizer."""
    return sample.text if sample.text or not sample.token_ids else " ".join(map(str, sample.token_ids))


def show_title(number: int, total: int, prompt: Prompt) -> None:
    """Which of several prompts the text that follows belongs to, in one line."""
    title = f"[{number}/{total}] {' '.join(_prompt_text(prompt).split())}"
    out.print(Text(title, style="dim"), soft_wrap=True)


def _prompt_text(prompt: Prompt) -> str:
    """Of a chat the last message, of token ids their number."""
    if isinstance(prompt, str):
        return prompt
    if "prompt_token_ids" in prompt:
        return f"prompt of {len(prompt['prompt_token_ids'])} tokens"
    return str(prompt["messages"][-1].get("content") or "") if "messages" in prompt else str(prompt["prompt"])


def show_text(output: RequestOutput) -> None:
    """The samples of one prompt."""
    for sample in output.outputs:
        label = f" [{sample.index}]" if len(output.outputs) > 1 else ""
        line = Text(output.prompt or "", style="dim")
        line.append_text(Text(_shown_text(sample), style="not dim"))
        line.append_text(Text(f"{label} ({sample.finish_reason})\n"))
        out.print(line, soft_wrap=True)
        if sample.error:
            err.print(f"error: {escape(sample.error)}")


def show_plan(plan: Plan) -> None:
    """`dflow-trt plan`: what the limits need, part by part, and what fits."""
    build = plan.build
    weights = f"weights: target {build.target_weights}, drafters {build.draft_weights}"
    limits = f"batch {build.max_batch_size}, sequence {build.max_seq_len}, tokens a pass {build.max_num_tokens}"
    _say(f"[bold]{build.backend} {build.dtype}[/]  {weights}; {limits}")
    out.print(_part_table(plan.memory))
    if plan.fit is not None:
        _say(_budget_line(plan.memory.total, plan.fit))
        _say(f"largest batch for sequences of {build.max_seq_len}: {plan.fit.max_batch_size or 'none fits'}")
        _say(f"longest sequence for a batch of {build.max_batch_size}: {plan.fit.max_seq_len or 'none fits'}")
        out.print(_fit_table(plan.fit))


def _part_table(plan: MemoryPlan) -> Table:
    columns = (Column(name, justify="right", no_wrap=True) for name in ("size", "a request", "a token"))
    table = Table("memory", *columns, box=box.SIMPLE_HEAD)
    for name, size in (
        ("target weights", plan.target_weights),
        ("drafter weights", plan.draft_weights),
        ("vocabulary tables", plan.vocabulary),
    ):
        table.add_row(name, show_bytes(size))
    for name, size in (("target KV", plan.target_cache), ("drafter KV", plan.drafter_cache)):
        table.add_row(name, *map(show_bytes, (size, plan.per_slot(size), plan.per_token(size))))
    table.add_row("relay state", show_bytes(plan.relay_state), show_bytes(plan.per_slot(plan.relay_state)))
    table.add_row("hidden states and logits", show_bytes(plan.outputs))
    table.add_row("workspace (estimate)", show_bytes(plan.workspace), end_section=True)
    table.add_row("[bold]in all[/]", f"[bold]{show_bytes(plan.total)}[/]")
    return table


def _budget_line(total: int, fit: Fit) -> str:
    left = fit.budget - total
    verdict = f"fits, {show_bytes(left)} left" if left >= 0 else f"does not fit, {show_bytes(-left)} too much"
    return f"{show_bytes(fit.budget)} ({fit.memory_fraction:g} of {show_bytes(fit.memory)}): {verdict}"


def _fit_table(fit: Fit) -> Table:
    """Bytes in all by batch and sequence length; a dash where that does not fit."""
    lengths = [cell.max_seq_len for cell in fit.table[0]] if fit.table else []
    columns = (Column(str(length), justify="right", no_wrap=True) for length in lengths)
    table = Table(Column("batch", justify="right"), *columns, box=box.SIMPLE_HEAD)
    for row in fit.table:
        table.add_row(str(row[0].max_batch_size), *(show_bytes(cell.total) if cell.fits else "-" for cell in row))
    return table
