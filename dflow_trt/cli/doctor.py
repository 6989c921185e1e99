"""``dflow-trt doctor``."""

from __future__ import annotations

import click

from dflow_trt.cli.common import print_json
from dflow_trt.cli.interrupts import loading
from dflow_trt.errors import UserError


@click.command()
@click.option("--self-test", is_flag=True, help="Also build the example and run it, on a GPU beside the CPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(self_test: bool, as_json: bool) -> None:
    """Show what this machine has, what is missing, and the command that fixes it."""
    with loading():
        from dflow_trt.doctor import show
        from dflow_trt.doctor.examine import backends, examine

    findings = examine()
    if self_test and show.works_on_cpu(findings):
        with loading():
            from dflow_trt.doctor.selftest import self_test as run

        findings += run(backends(findings))
    if as_json:
        print_json(show.as_json(findings))
    else:
        show.show(findings)
    if not show.works_on_cpu(findings):
        raise UserError("doctor: the CPU path does not work here; the findings say what to do")
