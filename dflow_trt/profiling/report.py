"""The HTML report: one file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup

from dflow_trt.memory import show_bytes
from dflow_trt.profiling import words
from dflow_trt.profiling.charts import charts
from dflow_trt.profiling.metrics import survival
from dflow_trt.profiling.record import (
    PERCENTILES,
    Advice,
    Cost,
    Memory,
    Part,
    PointResult,
    Profile,
    Roofline,
    ServerCheck,
)

SHOWN = (50, 95, 99)  # percentiles in the first table; the others are behind the plot
LATENCIES = ("ttft", "tpot", "itl", "round_gap", "request")


@dataclass(frozen=True)
class Column:
    """text: to the left, else a figure. long: may be broken into lines."""

    name: str
    text: bool = False
    long: bool = False


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    note: str = ""

    @property
    def rows(self) -> list[list[tuple[Column, str]]]:
        return [list(zip(self.columns, row, strict=True)) for row in self.cells]


@dataclass(frozen=True)
class Card:
    """A figure to see first. mood: "good", "bad" or neither."""

    name: str
    value: str
    note: str
    mood: str = ""


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    table: Table


def report(profile: Profile) -> str:
    """The page."""
    folder = files("dflow_trt.profiling") / "page"
    source = (folder / "report.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    return page.render(
        css=Markup((folder / "report.css").read_text(encoding="utf-8")),  # the package's own
        profile=profile,
        few=words.TOO_FEW,
        title=words.title(profile),
        subtitle=_subtitle(profile),
        cards=list(_cards(profile)),
        advice=_advice(profile.advice) if profile.advice else None,
        tables=[_speed(profile.results), _latency(profile.results)],
        charts=charts(profile),
        details=_details(profile),
        sections=list(_sections(profile)),
    )


def _subtitle(profile: Profile) -> str:
    where = f"{profile.machine.cpu}{words.threads(profile.settings)}"
    often = f"{profile.settings.repetitions} repetitions"
    return f"{profile.created[:10]} on {where}. {often} of {words.asked(profile.settings)}."


# -- first -------------------------------------------------------------------------------------------------------------


def _cards(profile: Profile) -> Iterator[Card]:
    best = _best(profile.results)
    if best is not None and best.speedup is not None:
        yield Card(
            "fastest, over ar",
            words.times(best.speedup.wall.value),
            f"{best.point.label}, {best.point.load}",
            "good" if best.speedup.wall.value > 1 else "bad",
        )
    fastest = max(profile.results, key=lambda each: each.throughput.tokens_per_second or 0.0)
    rate = words.number(fastest.throughput.tokens_per_second, 1)
    yield Card("most tokens a second", rate, f"{fastest.point.label}, {fastest.point.load}")
    tau = max(profile.results, key=lambda each: each.total.tau_emitted or 0.0)
    kept = f"{words.number(tau.total.tau_accepted)} drafts of them; {tau.point.label}"
    yield Card("tokens a round (tau)", words.number(tau.total.tau_emitted), kept)
    good = profile.lossless.same == profile.lossless.compared
    same = f"{profile.lossless.same} of {profile.lossless.compared}"
    yield Card("sequences equal to ar's", same, words.lossless(profile.lossless), "good" if good else "bad")


def _best(results: Sequence[PointResult]) -> PointResult | None:
    """The point with the largest speed-up, if there is one."""
    found = [result for result in results if result.speedup is not None]
    return max(found, key=lambda each: each.speedup.wall.value if each.speedup else 0.0, default=None)


# -- tables ------------------------------------------------------------------------------------------------------------


def _figures(*names: str) -> list[Column]:
    return [Column("load", True), Column("strategy", True), *(Column(name) for name in names)]


def _of(result: PointResult, cells: Iterable[str]) -> list[str]:
    return [result.point.load, result.point.label, *cells]


def _speed(results: Sequence[PointResult]) -> Table:
    good = any(result.goodput for result in results)
    names = ["tau", "kept", "wasted", "tok/s", "decode tok/s", "over ar", "95 %", "by CPU time"]
    rows = [_of(result, _speed_cells(result, good)) for result in results]
    note = "tau: tokens a round; kept: accepted drafts among them; wasted: of the drafts that were verified. "
    note += "Decode: steps in which every request decodes. 95 %: the interval of the speed-up, from paired turns."
    return Table(_figures(*names, *(["good/s"] if good else []), "equal to ar"), rows, note)


def _speed_cells(result: PointResult, good: bool) -> Iterator[str]:
    total, speed = result.total, result.throughput
    yield from (words.number(total.tau_emitted), words.number(total.tau_accepted), words.percent(total.wasted))
    yield from (words.number(speed.tokens_per_second, 1), words.number(speed.decode_tokens_per_second, 1))
    yield words.times(result.speedup.wall.value if result.speedup else None)
    yield words.span(result.speedup.wall if result.speedup else None)
    yield words.times(result.speedup.cpu.value if result.speedup and result.speedup.cpu else None)
    if good:
        yield words.number(result.goodput.requests_per_second if result.goodput else None)
    yield f"{result.same}/{result.compared}"


def _latency(results: Sequence[PointResult]) -> Table:
    names = [f"{name} p{which}" for name in ("TTFT", "TPOT", "ITL") for which in SHOWN]
    rows = []
    for result in results:
        found = (result.latency.ttft, result.latency.tpot, result.latency.itl)
        rows.append(_of(result, (words.percentile(each, which) for each in found for which in SHOWN)))
    few = any(words.TOO_FEW in row for row in rows)
    note = f"Milliseconds. {words.sample_rule()}." if few else "Milliseconds."
    return Table(_figures(*names), rows, note)


def _advice(found: Sequence[Advice]) -> Table:
    rows = []
    for each in found:
        best = each.forecasts[each.best_drafts - 1] if each.best_drafts else None
        use = words.choice(each)
        rate = words.percent(each.break_even_rate) if each.break_even_rate is not None else "never"
        needs, gives = words.number(each.break_even), words.number(each.forecasts[-1].tau_emitted)
        rows.append(
            [words.where(each), each.strategy, use, words.times(best.predicted if best else None), needs, rate, gives]
        )
    columns = [Column("load", True), Column("strategy", True), Column("use", True)]
    names = ("predicted", "pays from tau", "or from a chance of", "tau here")
    note = "Of decoding alone. All drafts together pay from so many tokens a round on, or where each has this chance."
    return Table([*columns, *(Column(name) for name in names)], rows, note)


def _details(profile: Profile) -> dict[str, Table]:
    """What lies behind the plots, by their names."""
    found = {"latency": _distributions(profile.results), "acceptance": _positions(profile.results)}
    if any(result.stages for result in profile.results):
        found["stages"] = _stages(profile.results)
    if profile.advice:
        found["lengths"] = _lengths(profile.advice)
    if profile.roofline is not None:
        found["roofline"] = _roofline(profile.roofline)
    if profile.memory is not None:
        found["memory"] = _sizes(profile.memory)
    return found


def _distributions(results: Sequence[PointResult]) -> Table:
    rows = []
    for result in results:
        for name in LATENCIES:
            found = getattr(result.latency, name)
            shown = [words.percentile(found, which) for which in PERCENTILES]
            rows.append(_of(result, [name.replace("_", " "), str(found.n), words.number(found.mean), *shown]))
    return Table(_figures("what", "samples", "mean", *(f"p{which}" for which in PERCENTILES)), rows, "Milliseconds.")


def _positions(results: Sequence[PointResult]) -> Table:
    rows = []
    for result in results:
        for counts in (*result.by_task, result.total):
            shares = ", ".join(f"{100 * share:.0f}" for share in survival(counts))
            tau = (words.number(counts.tau_emitted), words.number(counts.tau_accepted))
            rows.append(_of(result, [counts.task, str(counts.rounds), *tau, words.percent(counts.wasted), shares]))
    names = ("task", "rounds", "tau", "kept", "wasted", "accepted up to position 1, 2, ... (%)")
    return Table(_figures(*names), rows)


def _stages(results: Sequence[PointResult]) -> Table:
    found = [(result, result.stages) for result in results if result.stages is not None]
    names = words.ordered(list(dict.fromkeys(name for _, stages in found for name in stages.milliseconds)))
    rows = [
        _of(
            result,
            [
                str(stages.rounds),
                *(words.number(stages.milliseconds.get(name), 3) for name in names),
                words.number(stages.total, 3),
                words.percent(stages.relay_share, 1),
            ],
        )
        for result, stages in found
    ]
    note = "Milliseconds a round. The relay stage also embeds the block, in strategies without a relay nothing else. "
    note += "Draft: all calls of a round. Prompt lookup is among the host's work."
    return Table(_figures("rounds", *names, "round", "relay's share"), rows, note)


def _lengths(advice: Sequence[Advice]) -> Table:
    names = ("drafts", "tokens a round", "ms a round", "predicted", "measured")
    columns = [Column("load", True), Column("strategy", True), *(Column(name) for name in names)]
    rows = [
        [
            words.where(each),
            each.strategy,
            str(forecast.drafts),
            words.number(forecast.tau_emitted),
            words.number(forecast.milliseconds, 3),
            words.times(forecast.predicted),
            words.times(forecast.measured),
        ]
        for each in advice
        for forecast in each.forecasts
    ]
    return Table(columns, rows)


def _roofline(found: Roofline) -> Table:
    names = ("requests", "drafts", "weights", "MB", "Mop", "ms", "roof, ms", "reached", "bound by")
    columns = [Column("strategy", True), Column("pass", True), *(Column(name) for name in names)]
    rows = [
        [
            each.strategy,
            each.stage,
            str(each.batch),
            str(each.drafts),
            each.form,
            words.number(each.bytes / 1e6),
            words.number(each.operations / 1e6, 1),
            words.number(each.milliseconds, 3),
            words.number(each.roof, 3),
            words.percent(each.fraction),
            each.bound,
        ]
        for each in found.passes
    ]
    return Table(columns, rows)


def _sizes(found: Memory) -> Table:
    planned = [[f"planned: {name.replace('_', ' ')}", _shown(name, size)] for name, size in found.planned.items()]
    planned += [
        [f"planned for {drafter}: {name.replace('_', ' ')}", show_bytes(size)]
        for drafter, sizes in found.drafters.items()
        for name, size in sizes
    ]
    measured = {
        "before the engines were loaded": found.before,
        "with the engines loaded": found.opened,
        "after the runs": found.after,
        "of it in no file": found.anonymous,
        "at most": found.peak,
    }
    rows = [
        [f"used by the {found.device}: {name}", show_bytes(size)] for name, size in measured.items() if size is not None
    ]
    limit = [["requests that the memory holds", str(found.batch_limit)]] if found.batch_limit else []
    return Table([Column("what", True), Column("size")], [*planned, *rows, *limit])


def _shown(name: str, figure: int) -> str:
    return str(figure) if name in ("slots", "cache_rows") else show_bytes(figure)


# -- the rest ----------------------------------------------------------------------------------------------------------


def _sections(profile: Profile) -> Iterator[Section]:
    if profile.cost is not None:
        yield Section("cost", "Cost", _cost(profile.cost))
    if profile.server is not None:
        yield Section("server", "The server's own counters", _server(profile.server))
    yield Section("settings", "Settings", _settings(profile))


def _cost(found: Cost) -> Table:
    rows = [
        [row.point.load, row.point.label, words.number(row.per_million), words.percent(row.busy_share)]
        for row in found.rows
    ]
    note = f"At {found.price_per_hour:g} an hour, always busy."
    if found.hosted_price is not None:
        note += f" Busy share: of the time it must be, to cost no more than {found.hosted_price:g} a million elsewhere."
    return Table(_figures("a million output tokens", "busy share to break even"), rows, note)


def _server(found: ServerCheck) -> Table:
    columns = [Column("counter", True), Column("strategy", True), Column("client"), Column("server"), Column("", True)]
    rows = [
        [each.counter, each.strategy, f"{each.client:g}", f"{each.server:g}", "agree" if each.agree else "DISAGREE"]
        for each in found.counters
    ]
    return Table(columns, rows, " ".join([found.metrics_url, *found.notes]))


def _settings(profile: Profile) -> Table:
    """Everything that was set, and where it ran."""
    rows = [*_flat("", profile.subject), *_flat("", profile.settings), *_flat("", profile.machine)]
    return Table([Column("setting", True), Column("value", True, long=True)], rows)


def _flat(prefix: str, part: Part) -> Iterator[list[str]]:
    for name in type(part).model_fields:
        value = getattr(part, name)
        shown = prefix + name.replace("_", " ")
        if name == "points":
            yield [shown, "; ".join(f"{point.label} ({point.load})" for point in value)]
        elif isinstance(value, list) and value and isinstance(value[0], Part):
            for each in value:
                yield from _flat(f"{shown}: ", each)
        elif isinstance(value, Mapping):
            yield [shown, ", ".join(f"{key} {entry}" for key, entry in value.items()) or words.NOTHING]
        elif isinstance(value, list):
            yield [shown, ", ".join(map(str, value)) or words.NOTHING]
        else:
            yield [shown, words.NOTHING if value is None else str(value)]
