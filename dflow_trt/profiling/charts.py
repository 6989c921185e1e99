"""The report's plots: SVG by matplotlib, in colours that the page decides.

matplotlib draws in placeholder colours, which become variables of the page's style sheet: one drawing serves light and
dark. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from dflow_trt.profiling import words
from dflow_trt.profiling.metrics import survival
from dflow_trt.profiling.record import (
    PAPER_RELAY_SHARE,
    Acceptance,
    Distribution,
    Point,
    PointResult,
    Profile,
    Roofline,
)
from dflow_trt.spec import AUTOREGRESSIVE, DRAFT_POLICIES

WIDTH = 9.6  # inches, of 72 points; the page scales it
INK, FAINT, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = tuple(f"#0102{i:02x}" for i in range(8))
STAGES = tuple(f"#0103{i:02x}" for i in range(8))
HEAT = "#010401"
CELLS = 28  # of heat maps side by side
LEGEND_ROW = 0.2  # inches
MOST_PANELS = 4  # of lengths
STYLES: tuple[Any, ...] = ("solid", (0, (2, 2)), (0, (6, 2)), (0, (6, 2, 1, 2)))
MEMORY_PARTS = (
    "target_weights",
    "draft_weights",
    "vocabulary",
    "target_cache",
    "drafter_cache",
    "relay_state",
    "outputs",
    "workspace",
)
VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--rule", PAPER: "--paper", HEAT: "--heat"}
VARIABLES |= {colour: f"--s{i}" for i, colour in enumerate(SERIES)}
VARIABLES |= {colour: f"--g{i}" for i, colour in enumerate(STAGES)}

STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "both",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}


Panel = tuple[str, Callable[[PointResult], float | None]]


@dataclass(frozen=True)
class Loads:
    """A way to load a decoder. at: how much of it a point has, None where it is loaded otherwise. panel: what is drawn
    over it beside tokens a second."""

    name: str
    title: str
    unit: str
    at: Callable[[Point], float | None]
    panel: Panel
    caption: str


CLOSED = Loads(
    "load",
    "Throughput and latency by concurrency",
    "requests in flight",
    lambda point: point.concurrency,
    ("milliseconds a token after the first, median", lambda result: result.latency.tpot.p50),
    "Whole runs, prefill and the draining end of every turn included.",
)
OPEN = Loads(
    "rate",
    "Throughput and latency by arrivals",
    "requests a second",
    lambda point: point.rate,
    ("milliseconds to the first token, median", lambda result: result.latency.ttft.p50),
    "Poisson arrivals. Where tokens a second no longer rise, requests wait, and the first token is late.",
)


@dataclass(frozen=True)
class Chart:
    """One plot. label: what it shows, for those who do not see it."""

    name: str
    title: str
    caption: str
    svg: str


class Colours:
    """A colour for each series: faint for plain decoding, the others in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        drawn = [name for name in dict.fromkeys(names) if name != AUTOREGRESSIVE]
        self._of = {name: SERIES[1 + i % (len(SERIES) - 1)] for i, name in enumerate(drawn)}

    def __getitem__(self, name: str) -> str:
        return self._of.get(name, SERIES[0])


def charts(profile: Profile) -> list[Chart]:
    """Every plot that there are figures for."""
    with mpl.rc_context(STYLE):
        drawn = [draw(profile) for draw in _CHARTS]
    return [chart for chart in drawn if chart is not None]


def _chart(name: str, title: str, caption: str, figure: Figure) -> Chart:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Chart(name, title, caption, _themed(buffer.getvalue(), name, title))


def _themed(svg: str, name: str, title: str) -> str:
    """The <svg> element alone: the page's colours and font in place of ours, sized by the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#([^\s\")]+)", svg))  # of the ids; the others name nothing, and are in every plot
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1).strip()


def _figure(rows: float, columns: int = 1, stacked: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure so many inches high, with its axes."""
    figure = Figure(figsize=(WIDTH, rows), layout="constrained")
    return figure, figure.subplots(stacked, columns, squeeze=False, **options)


def _legend(figure: Figure, axes: Any, columns: int = 4) -> None:
    """What the axes' series are, below the plots, which keep their height."""
    handles, labels = axes.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _bars_height(count: int) -> float:
    return 0.9 + 0.34 * count


def _loads(results: Sequence[PointResult]) -> list[str]:
    return list(dict.fromkeys(result.point.load for result in results))


def _first_load(profile: Profile) -> list[PointResult]:
    """The results of one load: the first, which is the lightest unless the user put another in front."""
    load = profile.results[0].point.load
    return [result for result in profile.results if result.point.load == load]


def _longest(results: Sequence[PointResult], policy: str | None = None) -> list[PointResult]:
    """Of points that differ in nothing but their drafts, the one that verifies most; with a policy, of those of it if
    there are any."""
    chosen: dict[Point, PointResult] = {}
    for result in sorted(results, key=lambda each: (each.point.draft_policy == policy, _most_drafts(each.point))):
        plain = {"draft_tokens": None} | ({"draft_policy": policy} if policy is not None else {})
        chosen[result.point.model_copy(update=plain)] = result
    kept = {result.point for result in chosen.values()}
    return [result for result in results if result.point in kept]


def _swept(profile: Profile) -> str:
    """What a caption adds where :func:`_longest` left points out."""
    return " Of several draft lengths, the longest." if any(r.point.draft_tokens for r in profile.results) else ""


def _most_drafts(point: Point) -> float:
    return float("inf") if point.draft_tokens is None else point.draft_tokens


def _row_label(point: Point, loads: int) -> str:
    return point.label if loads == 1 else f"{point.label}, {point.load}"


# -- speed -------------------------------------------------------------------------------------------------------------


def _speedup_chart(profile: Profile) -> Chart | None:
    """Speed-up over ar with its interval, a row a point."""
    results = [result for result in profile.results if result.speedup]
    if not results:
        return None
    colours, loads = Colours([result.point.strategy for result in results]), len(_loads(results))
    figure, [[axes]] = _figure(_bars_height(len(results)))
    for row, result in enumerate(results):
        assert result.speedup is not None
        found, colour = result.speedup.wall, colours[result.point.strategy]
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [row, row], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot([found.value], [row], "o", color=colour, markersize=7)
        axes.annotate(words.interval(found), (found.value, row), (10, 7), textcoords="offset points", fontsize=8.5)
    axes.axvline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    _rows(axes, [_row_label(result.point, loads) for result in results])
    axes.set_xlabel("times the speed of ar at the same load")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.9), high + 0.25 * (high - low))
    caption = "Whole requests, prefill included. Bars: 95 % of what comes out when the paired turns are drawn again."
    return _chart("speedup", "Speed-up over plain decoding", caption, figure)


def _rows(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def _latency_chart(profile: Profile) -> Chart | None:
    """Distributions of one load: to the first token, between tokens, whole requests."""
    results = _longest(_first_load(profile))
    panels: list[tuple[str, Callable[[PointResult], Distribution]]] = [
        ("time to first token", lambda result: result.latency.ttft),
        ("between tokens", lambda result: result.latency.itl),
        ("whole request", lambda result: result.latency.request),
    ]
    figure, [row] = _figure(3.4, len(panels), sharey=True)
    colours, styles = Colours([result.point.strategy for result in results]), _styles(results)
    for axes, (title, of) in zip(row, panels, strict=True):
        for result in results:
            point, curve = result.point, of(result).curve
            shares, drawn = np.linspace(0, 1, len(curve)), {"color": colours[point.strategy], "label": point.label}
            axes.plot(curve, shares, linestyle=styles[_setting(point)], **drawn)
        axes.set_title(title)
        axes.set_xlabel("milliseconds")
        _log_if_wide(axes)
    row[0].set_ylabel("share of samples")
    _legend(figure, row[0])
    caption = f"Load: {results[0].point.load}. Tokens that came together share the gap before them." + _swept(profile)
    return _chart("latency", "Latency", caption, figure)


def _setting(point: Point) -> tuple[str, float, int | None]:
    return point.draft_policy, point.temperature, point.input_len


def _styles(results: Sequence[PointResult]) -> dict[tuple[str, float, int | None], Any]:
    """A line for each policy, temperature and prompt length."""
    settings = dict.fromkeys(_setting(result.point) for result in results)
    return {setting: STYLES[i % len(STYLES)] for i, setting in enumerate(settings)}


def _log_if_wide(axes: Any) -> None:
    """A logarithmic axis where values span more than a decade and a half."""
    values = np.concatenate([line.get_xdata() for line in axes.lines] or [np.ones(1)])
    values = values[values > 0]
    if len(values) and values.max() > 30 * values.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")


def _load_chart(loads: Loads, profile: Profile) -> Chart | None:
    """Tokens a second, and a time, by the load; a line a strategy. None for a single load."""
    results = _longest([result for result in profile.results if loads.at(result.point) is not None])
    if len(_loads(results)) < 2:
        return None
    panels: list[Panel] = [("output tokens a second", lambda result: result.throughput.tokens_per_second), loads.panel]
    figure, [row] = _figure(3.4, len(panels))
    colours, styles = Colours([result.point.strategy for result in results]), _styles(results)
    for axes, (heading, of) in zip(row, panels, strict=True):
        for label in dict.fromkeys(result.point.label for result in results):
            mine = [result for result in results if result.point.label == label]
            places, point = [loads.at(each.point) for each in mine], mine[0].point
            drawn = {"color": colours[point.strategy], "linestyle": styles[_setting(point)], "label": label}
            axes.plot(places, [_or_nan(of(each)) for each in mine], "o", markersize=4, **drawn)
        axes.set_title(heading)
        axes.set_xlabel(loads.unit)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)
    _legend(figure, row[0])
    return _chart(loads.name, loads.title, loads.caption + _swept(profile), figure)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


# -- where time goes ---------------------------------------------------------------------------------------------------


def _stage_chart(profile: Profile) -> Chart | None:
    """Stacked milliseconds of a round, the relay's share beside."""
    results = [result for result in profile.results if result.stages]
    if not results:
        return None
    names = words.ordered(list(dict.fromkeys(n for each in results if each.stages for n in each.stages.milliseconds)))
    figure, [[axes]] = _figure(_bars_height(len(results)) + 0.4)
    left = np.zeros(len(results))
    for name in names:
        widths = np.array([each.stages.milliseconds.get(name, 0.0) if each.stages else 0.0 for each in results])
        colour = STAGES[words.STAGE_ORDER.index(name) if name in words.STAGE_ORDER else -1]
        axes.barh(range(len(results)), widths, left=left, height=0.62, color=colour, label=name)
        left += widths
    for row, result in enumerate(results):
        assert result.stages is not None
        share = result.stages.relay_share
        text = f"{left[row]:.2f} ms" + (f", relay {words.percent(share, 1)}" if share else "")
        axes.annotate(text, (left[row], row), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    loads = len(_loads(results))
    _rows(axes, [_row_label(result.point, loads) for result in results])
    axes.set_xlim(0, 1.28 * left.max())
    axes.set_xlabel("milliseconds a round")
    _legend(figure, axes, columns=len(names))
    caption = f"Steps that decode and do not prefill. The paper's relay takes {words.percent(PAPER_RELAY_SHARE, 1)}."
    return _chart("stages", "Where a round's time goes", caption, figure)


# -- acceptance --------------------------------------------------------------------------------------------------------


def _acceptance_chart(profile: Profile) -> Chart | None:
    """Rounds that accepted all drafts up to a position: a panel a strategy, or a row where there is one task."""
    results = [result for result in _longest(_first_load(profile), DRAFT_POLICIES[0]) if result.total.drafted_at]
    if not results:
        return None
    panels = _panels(results)
    width = max(len(result.total.drafted_at) for result in results)
    columns = min(len(panels), max(1, CELLS // (width + 1)))
    stacked, rows = -(-len(panels) // columns), max(map(len, panels.values()))
    figure, grid = _figure(0.5 + stacked * (0.5 + 0.25 * rows), columns, stacked, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, counts) in zip(grid.flat, panels.items(), strict=False):
        _heat_map(axes, counts, width)
        axes.set_title(title)
    figure.supxlabel("draft position; tau: tokens a round, bonus token included", fontsize=10, color=FAINT)
    caption = f"Percent of all rounds that accepted this draft and those before it. Load: {results[0].point.load}."
    caption += _swept(profile)
    return _chart("acceptance", "Acceptance by position and task", caption, figure)


def _panels(results: Sequence[PointResult]) -> dict[str, dict[str, Acceptance]]:
    """By title, rows by label."""
    if all(len(result.by_task) == 1 for result in results):
        return {results[0].by_task[0].task: {result.point.label: result.total for result in results}}
    return {
        result.point.label: {counts.task: counts for counts in (*result.by_task, result.total)} for result in results
    }


def _heat_map(axes: Any, rows: Mapping[str, Acceptance], width: int) -> None:
    for row, counts in enumerate(rows.values()):
        for column, share in enumerate(survival(counts)):
            axes.add_patch(mpl.patches.Rectangle((column + 0.52, row - 0.46), 0.96, 0.92, color=HEAT, alpha=share))
            colour = PAPER if share > 0.6 else INK
            axes.text(column + 1, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=colour)
        tau = words.number(counts.tau_emitted)
        axes.text(width + 1, row, tau, ha="center", va="center", fontsize=8)
    _rows(axes, list(rows))
    axes.set_xlim(0.45, width + 1.5)
    axes.set_xticks(range(1, width + 2), [*map(str, range(1, width + 1)), "tau"])
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def _length_chart(profile: Profile) -> Chart | None:
    """Predicted and measured speed-up by the drafts that are verified."""
    if not any(advice.forecasts for advice in profile.advice):
        return None
    loads = list(dict.fromkeys(map(words.where, profile.advice)))
    shown = loads[:MOST_PANELS]
    figure, [row] = _figure(3.2, len(shown), sharey=True)
    colours = Colours([advice.strategy for advice in profile.advice])
    for axes, load in zip(row, shown, strict=True):
        for advice in (each for each in profile.advice if words.where(each) == load):
            colour, drafts = colours[advice.strategy], [each.drafts for each in advice.forecasts]
            axes.plot(drafts, [each.predicted for each in advice.forecasts], color=colour, label=advice.strategy)
            measured = [(each.drafts, each.measured) for each in advice.forecasts if each.measured is not None]
            axes.plot(*zip(*measured, strict=True), "o", color=colour) if measured else None
        axes.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title(load)
        axes.set_xlabel("drafts verified in a round")
        axes.xaxis.get_major_locator().set_params(integer=True)
    row[0].set_ylim(bottom=0)
    row[0].set_ylabel("decode speed-up over ar")
    _legend(figure, row[0])
    caption = "Lines: measured acceptance over measured round times. Dots: what those runs gave."
    caption += f" Loads beyond the first {MOST_PANELS} are in the table." if len(loads) > MOST_PANELS else ""
    return _chart("lengths", "How many drafts to verify", caption, figure)


# -- the machine -------------------------------------------------------------------------------------------------------


def _roofline_chart(profile: Profile) -> Chart | None:
    """Operations a second by operations a byte, under the machine's roof."""
    found = profile.roofline
    if found is None or not found.passes:
        return None
    figure, [[axes]] = _figure(4.2)
    colours = Colours([each.strategy for each in found.passes])
    seen: set[str] = set()
    for each in found.passes:
        marker = "o" if each.stage == "verify" else "^"
        rate = each.operations / each.milliseconds / 1e6
        label = f"{each.strategy} {each.stage}"
        axes.plot(
            [each.operations / each.bytes], [rate], marker, color=colours[each.strategy], markersize=7,
            label=None if label in seen else label, linestyle="none",
        )  # fmt: skip
        seen.add(label)
    _draw_roof(axes, found)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("Gop/s")
    _legend(figure, axes)
    caption = (
        "Circles are verify passes, triangles draft passes; counted are weights, live cache rows, products, attention. "
        f"Slopes: from a working set of the model's size, {found.roof.working_set_bandwidth / 1e9:.1f} GB/s, and from "
        f"main memory, {found.roof.memory_bandwidth / 1e9:.1f} GB/s."
    )
    return _chart("roofline", "Roofline", caption, figure)


def _draw_roof(axes: Any, found: Roofline) -> None:
    roof = found.roof
    intensities = [each.operations / each.bytes for each in found.passes]
    forms = [form for form in roof.operations if any(each.form == form for each in found.passes)]
    x = np.geomspace(min(intensities) / 3, max(*intensities, 30) * 4, 200)
    for i, form in enumerate(sorted(forms, key=lambda form: roof.operations[form])):
        y = np.minimum(roof.working_set_bandwidth * x, roof.operations[form]) / 1e9
        axes.plot(x, y, color=INK, linewidth=1.4)
        place = (-4, -11) if i + 1 < len(forms) else (-4, 4)  # the lower one below its line
        axes.annotate(form, (x[-1], y[-1]), place, textcoords="offset points", ha="right", fontsize=8.5)
    slow = np.minimum(roof.memory_bandwidth * x, max(roof.operations[form] for form in forms)) / 1e9
    axes.plot(x, slow, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    lowest = min(each.operations / each.milliseconds / 1e6 for each in found.passes)
    axes.set_ylim(lowest / 3, max(roof.operations[form] for form in forms) / 1e9 * 2.2)


def _memory_chart(profile: Profile) -> Chart | None:
    """Planned parts beside what became resident, and what of them each drafter has."""
    found = profile.memory
    if found is None or found.after is None or found.before is None:
        return None
    labels = ["planned", *(f"of it {name}" for name in found.drafters), "used"]
    figure, [[axes]] = _figure(_bars_height(len(labels)) + 0.5)
    widths = [_stacked(axes, 0, found.planned)]
    for row, sizes in enumerate(found.drafters.values(), 1):
        parts = {"draft_weights": sizes.weights, "drafter_cache": sizes.cache, "relay_state": sizes.relay_state}
        widths.append(_stacked(axes, row, parts))
    widths.append((found.after - found.before) / 1e6)
    axes.barh([len(widths) - 1], widths[-1:], height=0.6, color=FAINT)
    for row, width in enumerate(widths):
        text = f"{width:.1f} MB"
        axes.annotate(text, (width, row), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    _rows(axes, labels)
    axes.set_xlim(0, 1.12 * max(widths))
    axes.set_xlabel("MB")
    _legend(figure, axes)
    caption = f"Used: what the {found.device} grew by. On a CPU, caches count as they fill."
    return _chart("memory", "Memory", caption, figure)


def _stacked(axes: Any, row: int, parts: Mapping[str, int]) -> float:
    """One bar of the parts, in their order; its length."""
    left = 0.0
    for i, part in enumerate(MEMORY_PARTS):
        size = parts.get(part, 0) / 1e6
        label = part.replace("_", " ") if row == 0 else None
        axes.barh([row], [size], left=left, height=0.6, color=STAGES[i], label=label)
        left += size
    return left


_CHARTS: tuple[Callable[[Profile], Chart | None], ...] = (
    _speedup_chart,
    _latency_chart,
    _stage_chart,
    partial(_load_chart, CLOSED),
    partial(_load_chart, OPEN),
    _acceptance_chart,
    _length_chart,
    _roofline_chart,
    _memory_chart,
)
