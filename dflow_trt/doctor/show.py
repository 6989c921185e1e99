"""The findings as a table for people, or as data for programs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from dflow_trt.doctor.examine import Finding

PLAIN_WIDTH = 200  # columns of a file or pipe, as everywhere
COLOURS = {"ok": "green", "missing": "yellow", "untested": "yellow", "broken": "red"}
CPU_PATH = "everything"


def works_on_cpu(findings: Sequence[Finding]) -> bool:
    """Whether all is well that the CPU path needs: the exit code of the command."""
    return all(finding.state == "ok" for finding in findings if finding.serves == CPU_PATH)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """{"cpu_path": bool, "findings": [..]}."""
    return {"cpu_path": works_on_cpu(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}


def show(findings: Sequence[Finding]) -> None:
    """One row a finding; then the commands that fix what is missing, whole; then what works, in a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PLAIN_WIDTH
    columns = (Column("", no_wrap=True), Column("state", no_wrap=True), "for", "found")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for each in findings:
        state = Text(each.state, style=COLOURS[each.state])
        table.add_row(each.name, state, each.serves, Text(each.found, overflow="fold"))
    out.print(table)
    for fix in dict.fromkeys(each.fix for each in findings if each.fix):
        names = ", ".join(each.name for each in findings if each.fix == fix)
        out.print(Text(f"  for {names}:\n    ").append(fix, style="bold"), soft_wrap=True)
    out.print(f"  the CPU path {'works' if works_on_cpu(findings) else '[bold red]does not work[/]: see above'}")
