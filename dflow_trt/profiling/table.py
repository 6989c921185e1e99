"""A profile in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dflow_trt.memory import show_bytes
from dflow_trt.profiling import words
from dflow_trt.profiling.record import (
    PAPER_RELAY_SHARE,
    Advice,
    Cost,
    Memory,
    PointResult,
    Profile,
    Roofline,
    ServerCheck,
)


def show_profile(profile: Profile, out: Console) -> None:
    """Tables, then what follows from them, a line each."""
    out.print(f"[bold]{escape(words.title(profile))}[/]", soft_wrap=True)
    out.print(_setting(profile), soft_wrap=True, style="dim")
    out.print(_speed_table(profile.results, profile.cost), _latency_table(profile.results))
    if any(result.stages for result in profile.results):
        out.print(_stage_table(profile.results))
    if profile.advice:
        out.print(_advice_table(profile.advice))
    for line in _lines(profile):
        out.print(line, soft_wrap=True)


def _setting(profile: Profile) -> str:
    settings = profile.settings
    often = f"{settings.repetitions} repetitions, {settings.warmup} warm-up turns"
    return f"{words.asked(settings)}, seed {settings.seed}{words.threads(settings)}; {often}"


def _right(names: Sequence[str]) -> Iterator[Column]:
    return (Column(name, justify="right", no_wrap=True) for name in names)


def _speed_table(results: Sequence[PointResult], cost: Cost | None) -> Table:
    names = ("tau", "kept", "wasted", "tok/s", "decode tok/s", "over ar", "95 %", "good", "a million", "same")
    table = Table("load", "strategy", *_right(names), box=box.SIMPLE_HEAD)
    prices = {row.point: row.per_million for row in cost.rows} if cost is not None else {}
    for result in results:
        total, speed = result.total, result.throughput
        table.add_row(
            result.point.load,
            result.point.label,
            words.number(total.tau_emitted),
            words.number(total.tau_accepted),
            words.percent(total.wasted),
            words.number(speed.tokens_per_second, 1),
            words.number(speed.decode_tokens_per_second, 1),
            words.times(result.speedup.wall.value if result.speedup else None),
            words.span(result.speedup.wall if result.speedup else None),
            words.percent(result.goodput.share if result.goodput else None),
            words.number(prices.get(result.point)),
            f"{result.same}/{result.compared}",
        )
    return table


def _latency_table(results: Sequence[PointResult]) -> Table:
    names = [f"{name} p{which}" for name in ("TTFT", "TPOT", "ITL") for which in (50, 95, 99)]
    table = Table("load", "strategy", *_right([*names, "round gap p99"]), title="milliseconds", box=box.SIMPLE_HEAD)
    for result in results:
        found = result.latency
        cells = [
            words.percentile(each, which) for each in (found.ttft, found.tpot, found.itl) for which in (50, 95, 99)
        ]
        table.add_row(result.point.load, result.point.label, *cells, words.percentile(found.round_gap, 99))
    if any(words.TOO_FEW in column.cells for column in table.columns):
        table.caption = words.sample_rule()
    return table


def _stage_table(results: Sequence[PointResult]) -> Table:
    found = [result for result in results if result.stages]
    names = words.ordered(list(dict.fromkeys(name for each in found for name in each.stages.milliseconds)))  # type: ignore[union-attr]
    paper = f"paper {words.percent(PAPER_RELAY_SHARE, 1)}"
    columns = _right([*names, "round", "relay's share"])
    table = Table("load", "strategy", *columns, title="milliseconds a round", caption=paper, box=box.SIMPLE_HEAD)
    for result in found:
        stages = result.stages
        assert stages is not None
        cells = [words.number(stages.milliseconds.get(name), 3) for name in names]
        share = words.percent(stages.relay_share, 1)
        table.add_row(result.point.load, result.point.label, *cells, words.number(stages.total, 3), share)
    return table


def _advice_table(found: Sequence[Advice]) -> Table:
    columns = _right(("predicted", "pays from tau", "tau here"))
    table = Table("load", "strategy", "use", *columns, title="drafts to verify", box=box.SIMPLE_HEAD)
    for each in found:
        predicted = each.forecasts[each.best_drafts - 1].predicted if each.best_drafts else None
        needs, gives = words.number(each.break_even), words.number(each.forecasts[-1].tau_emitted)
        table.add_row(words.where(each), each.strategy, words.choice(each), words.times(predicted), needs, gives)
    return table


def _lines(profile: Profile) -> Iterator[str]:
    if profile.roofline is not None:
        yield from _roof_lines(profile.roofline)
    if profile.memory is not None:
        yield f"memory    {_memory_line(profile.memory)}"
    if profile.cost is not None:
        yield from _cost_lines(profile.cost)
    if profile.server is not None:
        yield from _server_lines(profile.server)
    for note in profile.notes:
        yield f"note      {escape(note)}"
    good = profile.lossless.same == profile.lossless.compared
    yield f"lossless  [{'green' if good else 'bold red'}]{escape(words.lossless(profile.lossless))}[/]"


def _roof_lines(found: Roofline) -> Iterator[str]:
    roof = found.roof
    forms = ", ".join(f"{form} {value / 1e9:.0f} Gop/s" for form, value in roof.operations.items())
    memory = f"{roof.working_set_bandwidth / 1e9:.1f} GB/s from {show_bytes(roof.working_set)}"
    yield f"roof      {memory}, {roof.memory_bandwidth / 1e9:.1f} GB/s from main memory, {forms}"
    for stage in dict.fromkeys(each.stage for each in found.passes):
        reached = sorted(round(100 * each.fraction) for each in found.passes if each.stage == stage)
        span = " to ".join(map(str, dict.fromkeys((reached[0], reached[-1]))))
        yield f"          {stage} passes reach {span} % of it"


def _memory_line(found: Memory) -> str:
    planned = f"planned {show_bytes(found.planned['total'])} for {found.planned['slots']} slots"
    if found.after is None or found.before is None:
        return planned
    grown = f"the {found.device} uses {show_bytes(max(0, found.after - found.before))} more than before"
    return f"{planned}; {grown}; there is room for {found.batch_limit} requests"


def _cost_lines(found: Cost) -> Iterator[str]:
    """The cheapest point; the others are in the table."""
    known = [row for row in found.rows if row.per_million is not None]
    row = min(known, key=lambda row: row.per_million or 0.0, default=None)
    if row is None:
        return
    where = f"{row.point.label}, {row.point.load}"
    line = f"cost      least: {words.number(row.per_million)} a million output tokens, {where}"
    if row.busy_share is not None:
        busy = "never equals" if row.busy_share > 1 else f"busy {words.percent(row.busy_share)} of the time equals"
        line += f"; {busy} the hosted price of {found.hosted_price:g}"
    yield line


def _server_lines(found: ServerCheck) -> Iterator[str]:
    wrong = [each for each in found.counters if not each.agree]
    if not wrong and found.counters:
        yield f"server    its counters agree with this client: {len(found.counters)} compared"
    for each in wrong:
        what = f"{each.counter} of {each.strategy}"
        yield f"server    [bold red]{what}: {each.server:g} there, {each.client:g} here[/]"
    for note in found.notes:
        yield f"server    {escape(note)}"
