"""CPU benchmark: ours against transformers, the ``dflash`` package, OpenVINO GenAI and llama.cpp, in one run.

    python build_scripts/bench_cpu.py                 # everything; OpenVINO and llama.cpp if their environment is there
    python build_scripts/bench_cpu.py --peers         # set that up first (some GB, and minutes of compiling)
    python build_scripts/bench_cpu.py --quick --only random --no-peers

Contenders are interleaved, ratios are paired, and every comparison also checks that outputs agree as they must; a
disagreement fails the run. Tables are for people; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench_common import REPO, Disagreement, Goal, print_goals, print_settings, settings
from bench_peers import PACKAGES, PeerError, has_package, make_environment


def main() -> int:
    """Run what was asked; 1 when outputs disagree."""
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    peers = _peers(options)
    run = settings(options.threads, quick=options.quick, pair=str(options.pair.name))
    print_settings(run)
    report: dict[str, Any] = {"settings": run}
    goals: list[Goal] = []
    try:
        for section in ("example", "random"):
            if options.only in (None, section):
                figures, wanted = (_example if section == "example" else _random)(options, peers)
                report[section] = figures
                goals += wanted
    except Disagreement as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_goals(goals)
    report["goals"] = [goal.as_json() for goal in goals]
    line = json.dumps(report)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--threads", type=int, default=1, help="threads of every contender [1]")
    add("--quick", action="store_true", help="few prompts and rounds, to see that it runs")
    add("--only", choices=("example", "random"))
    add("--peers", action=argparse.BooleanOptionalAction, help="OpenVINO GenAI and llama.cpp [if installed]")
    add("--peers-venv", type=Path, default=REPO / ".peers-venv", help="their environment, made by --peers")
    add("--pair", type=Path, default=REPO / "dflow_trt" / "example_data", help="folder with target, dflash, dflow")
    add("--work", type=Path, default=REPO / "build" / "bench", help="folder for bundles and converted models")
    add("--prompts", type=int, help="prompts of the example part [24, quick 8]")
    add("--max-tokens", type=int, help="tokens a prompt [96, quick 32]")
    add("--repetitions", type=int, help="of the example part [5, quick 2]")
    add("--cycles", type=int, help="turns of each contender of the random part [8, quick 2]")
    add("--json", type=Path, help="also write the JSON there")
    return parser.parse_args()


def _example(options: argparse.Namespace, peers: Path | None) -> tuple[dict[str, Any], list[Goal]]:
    from bench_example import ExampleOptions, run_example

    return run_example(
        ExampleOptions(
            pair=options.pair,
            work=options.work,
            num_prompts=options.prompts or (8 if options.quick else 24),
            max_tokens=options.max_tokens or (32 if options.quick else 96),
            repetitions=options.repetitions or (2 if options.quick else 5),
            threads=options.threads,
            peers=peers,
        )
    )


def _random(options: argparse.Namespace, peers: Path | None) -> tuple[dict[str, Any], list[Goal]]:
    from bench_random import RandomOptions, run_random

    return run_random(
        RandomOptions(
            work=options.work,
            contexts=() if options.quick else (512, 1536),
            cycles=options.cycles or (2 if options.quick else 8),
            rounds=2 if options.quick else 6,
            threads=options.threads,
            peers=peers,
        )
    )


def _peers(options: argparse.Namespace) -> Path | None:
    """The peers' environment, made where asked for; a line for each that goes without."""
    folder: Path = options.peers_venv
    if options.peers:
        make_environment(folder)
    for package in PACKAGES:
        if options.peers is False or not has_package(folder, package):
            print(f"{package.name}: left out (--peers installs it)")
    return None if options.peers is False else folder


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PeerError as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(1)
