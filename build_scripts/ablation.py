"""What self-conditioning, the relay and a causal head gain: the table of the README, on the example's target.

Every row is one `dflow-trt train` for every seed, on the answers of the example's target to 2000 worksheets, measured
on the example's held-out prompts at T = 0 and T = 1. Finished rows are kept, so an interrupted run goes on. A row that
is "at DFlow's compute" has as many steps as take DFlow's processor time. Takes a core some hours; needs the package
installed with its extras `train` and `profile`.

    python build_scripts/ablation.py --output ablation/ --seeds 0 1 2
    python build_scripts/ablation.py --output ablation/ --table      # of the rows that are finished

Writes table.md, ablation.json and curves.png into the output folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from make_example import DRAFTER, STAGES, write_training_prompts

import dflow_trt

EXAMPLE = Path(dflow_trt.__file__).with_name("example_data")
RESAMPLES = 4000
Counts = np.ndarray
"""[seeds, prompts, 2]: rounds and emitted tokens."""

HEAD = ("--head", "domino", "--head-state", "64", "--head-rank", "64")
DFLOW = ("--mode", "dflow")


@dataclass(frozen=True)
class Row:
    """A drafter: the row it goes on from, its flags, and its steps as a multiple of the second stage's."""

    title: str
    source: str | None
    flags: tuple[str, ...] = ()
    steps: float = 1.0


ROWS = {
    "base": Row("DFlash, first stage", None),
    "dflash": Row("DFlash", "base"),
    "self": Row("DFlash + self-conditioning", "base", ("--mode", "self-conditioned")),
    "dflow": Row("DFlow", "base", DFLOW),
    "dflash-long": Row("DFlash, at DFlow's compute", "base", steps=STAGES.dflow_cost),
    "dflow-at": Row("DFlow, `at_rejection`", "base", (*DFLOW, "--relay-start", "at_rejection")),
    "domino-base": Row("Domino, first stage", None, HEAD),
    "domino": Row("Domino", "domino-base"),
    "domino-dflow": Row("Domino + DFlow, online rollout", "domino-base", DFLOW),
    "domino-forced": Row("Domino + DFlow, without", "domino-base", (*DFLOW, "--rollout", "teacher-forced")),
    "self-long": Row(
        "DFlash + self-conditioning, at DFlow's compute", "base", ("--mode", "self-conditioned"), STAGES.self_cost
    ),
    "domino-long": Row("Domino, at DFlow's compute", "domino-base", steps=STAGES.dflow_cost),
}


def train(output: Path, name: str, seed: int) -> None:
    """One row for one seed, unless it is there."""
    row, folder = ROWS[name], output / f"{name}-{seed}"
    if folder.exists():
        return
    first = row.source is None
    steps = STAGES.dflash_steps if first else round(row.steps * STAGES.dflow_steps)
    rate = STAGES.dflash_rate if first else STAGES.dflow_rate
    start = DRAFTER if first else ("--from", str(output / f"{row.source}-{seed}"))
    files = ("--prompts", output / "training.jsonl", "--held-out-prompts", EXAMPLE / "prompts.jsonl")
    run = (
        "--steps",
        steps,
        "--every",
        steps // 4,
        "--learning-rate",
        rate,
        "--seed",
        seed,
        "--threads",
        1,
        "--cache",
        output / "cache",
    )
    command = [sys.executable, "-m", "dflow_trt", "train", "--target", EXAMPLE / "target", *files, "--output", folder]
    command += [*STAGES.common, *STAGES.anchors, *start, *row.flags, *run]
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def counts(output: Path, name: str, seeds: Sequence[int], way: str) -> Counts:
    """Rounds and emitted tokens of each held-out prompt, for every seed."""
    records = [json.loads((output / f"{name}-{seed}" / "training.json").read_text()) for seed in seeds]
    return np.array([record["held_out"][way] for record in records])[:, :, :2]


def tau(found: Counts) -> float:
    """Emitted tokens a round, averaged over seeds."""
    rounds, emitted = found[..., 0].sum(1), found[..., 1].sum(1)
    return float((emitted / rounds).mean())


def interval(compared: Counts, with_: Counts | None = None) -> tuple[float, float]:
    """95 % of the bootstrap over seeds and prompts: of tau, or of tau's ratio to `with_`, paired by both."""
    rng, results = np.random.default_rng(0), []
    seeds, prompts = compared.shape[:2]
    for _ in range(RESAMPLES):
        chosen = np.ix_(rng.integers(0, seeds, seeds), rng.integers(0, prompts, prompts))
        results.append(tau(compared[chosen]) / (1.0 if with_ is None else tau(with_[chosen])))
    low, high = np.quantile(results, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Shown:
    """A line of the table: a row as it is played."""

    row: str
    title: str
    relay_off: bool = False


def lines() -> list[Shown]:
    """Every row as it is; those with a relay without it too."""
    found = []
    for name, row in ROWS.items():
        if "dflow" in row.flags:
            found.append(Shown(name, f"{row.title}, relay off", relay_off=True))
        found.append(Shown(name, row.title))
    return [line for line in found if not ROWS[line.row].title.endswith("first stage")]


COMPARISONS = (
    ("DFlow over its self-conditioned control, equal steps", ("dflow", False), ("self", False)),
    ("DFlow over plain DFlash, equal steps", ("dflow", False), ("dflash", False)),
    ("DFlow over plain DFlash, equal compute", ("dflow", False), ("dflash-long", False)),
    ("DFlow over self-conditioning, equal compute", ("dflow", False), ("self-long", False)),
    ("DFlow, relay on over off", ("dflow", False), ("dflow", True)),
    ("`at_rejection` over `after_rejection`", ("dflow-at", False), ("dflow", False)),
    ("Domino over DFlash, equal steps", ("domino", False), ("dflash", False)),
    ("Domino + DFlow over Domino, equal steps", ("domino-dflow", False), ("domino", False)),
    ("Domino + DFlow over Domino, equal compute", ("domino-dflow", False), ("domino-long", False)),
    ("Domino + DFlow, online rollout over without", ("domino-dflow", False), ("domino-forced", False)),
)


def finished(output: Path, name: str, seeds: Sequence[int]) -> list[int]:
    """The seeds of a row that are there."""
    return [seed for seed in seeds if (output / f"{name}-{seed}" / "training.json").is_file()]


def summarise(output: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """All figures of the finished rows."""
    ways = {0: ("greedy", "relay_off"), 1: ("sampled", "relay_off_sampled")}
    rows, gains = {}, {}
    for line in lines():
        if not (have := finished(output, line.row, seeds)):
            continue
        record = json.loads((output / f"{line.row}-{have[0]}" / "training.json").read_text())
        cost = [_figures(output, line.row, seed)["training_cpu_seconds"] for seed in have]
        entry = {"seeds": have, "steps": record["figures"]["steps"], "cpu_seconds": round(float(np.mean(cost)), 1)}
        for temperature, pair in ways.items():
            found = counts(output, line.row, have, pair[line.relay_off])
            entry[f"T{temperature}"] = {"tau": tau(found), "interval": interval(found), "by_seed": _by_seed(found)}
        rows[line.title] = entry
    for title, left, right in COMPARISONS:
        have = [seed for seed in finished(output, left[0], seeds) if seed in finished(output, right[0], seeds)]
        if have:
            gains[title] = {"seeds": have} | {
                f"T{temperature}": _gain(*(counts(output, name, have, pair[off]) for name, off in (left, right)))
                for temperature, pair in ways.items()
            }
    return {"prompts": counts(output, "base", seeds[:1], "greedy").shape[1], "rows": rows, "gains": gains}


def _figures(output: Path, name: str, seed: int) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((output / f"{name}-{seed}" / "training.json").read_text())["figures"]
    return figures


def _by_seed(found: Counts) -> list[float]:
    return [round(tau(found[index : index + 1]), 3) for index in range(len(found))]


def _gain(left: Counts, right: Counts) -> dict[str, Any]:
    return {"gain": tau(left) / tau(right) - 1, "interval": [bound - 1 for bound in interval(left, right)]}


def markdown(figures: dict[str, Any]) -> str:
    """The two tables."""
    out = ["| drafter | steps | CPU s | seeds | tau, T = 0 | tau, T = 1 |", "| --- | --- | --- | --- | --- | --- |"]
    for title, row in figures["rows"].items():
        taus = " | ".join(_with_interval(row[key]["tau"], row[key]["interval"]) for key in ("T0", "T1"))
        out.append(f"| {title} | {row['steps']} | {row['cpu_seconds']:.0f} | {len(row['seeds'])} | {taus} |")
    out += ["", "| gain | seeds | T = 0 | T = 1 |", "| --- | --- | --- | --- |"]
    for title, row in figures["gains"].items():
        gains = " | ".join(_percent(row[key]) for key in ("T0", "T1"))
        out.append(f"| {title} | {len(row['seeds'])} | {gains} |")
    return "\n".join(out) + "\n"


def _with_interval(value: float, bounds: Sequence[float]) -> str:
    return f"{value:.2f} ({bounds[0]:.2f}-{bounds[1]:.2f})"


def _percent(gain: dict[str, Any]) -> str:
    low, high = gain["interval"]
    return f"{gain['gain']:+.1%} ({low:+.1%} to {high:+.1%})"


def plot_curves(output: Path, seeds: Sequence[int]) -> None:
    """tau by processor time of the second stage, mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, row in ROWS.items():
        have = finished(output, name, seeds)
        if row.source is None or not have:
            continue
        found = [_figures(output, name, seed) for seed in have]
        common = set.intersection(*(set(one["tau_by_step"]) for one in found))
        steps = sorted(common, key=int)
        taus = np.mean([[one["tau_by_step"][step]["tau_emitted"] for step in steps] for one in found], axis=0)
        cost = np.mean([one["training_cpu_seconds"] for one in found])
        axes.plot(
            [int(step) / int(steps[-1]) * cost for step in steps],
            taus,
            marker=".",
            label=f"{row.title}, seeds: {len(have)}",
        )
    axes.set_xlabel("processor seconds of the second stage")
    axes.set_ylabel("tokens a round, T = 0")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(output / "curves.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--table", action="store_true", help="train nothing; the table of what is finished")
    arguments = parser.parse_args()
    output, seeds = arguments.output, arguments.seeds
    output.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        write_training_prompts(output / "training.jsonl")
        for name in arguments.rows:
            for seed in seeds:
                train(output, name, seed)
    figures = summarise(output, seeds)
    (output / "ablation.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (output / "table.md").write_text(markdown(figures), encoding="utf-8")
    plot_curves(output, seeds)
    print(markdown(figures))


if __name__ == "__main__":
    main()
