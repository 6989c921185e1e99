"""``dflow-trt profile``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflow_trt.cli.common import FILE, FOLDER, POSITIVE
from dflow_trt.cli.interrupts import loading, undo_on_sigterm
from dflow_trt.errors import UserError

if TYPE_CHECKING:
    from dflow_trt.profiling.points import Options
    from dflow_trt.profiling.prices import Prices
    from dflow_trt.profiling.record import Profile
    from dflow_trt.profiling.run import Result
    from dflow_trt.profiling.workload import Choice


def _listed(kind: type[Any], metavar: str = "N,N,...") -> dict[str, Any]:
    """An option that takes several values with commas between; a tuple of them, or None."""

    def read(context: click.Context, param: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        try:
            return None if text is None else tuple(kind(part.strip()) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r}; allowed: numbers with commas between, e.g. 1,2,4") from None

    return {"callback": read, "metavar": metavar}


class WithDiff(click.Command):
    """A command beside which there is another: ``profile diff A B``. A bundle of that name is ``./diff``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["diff"]:
            return diff.make_context(f"{info_name} diff", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    flags: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("--prompts", "file"), {"type": FILE, "help": "JSONL of prompts, with their task labels."}),
        (("--example", "example"), {"is_flag": True, "help": "The example's prompts. [default, with a tokenizer]"}),
        (
            ("--input-len", "--context-length", "input_lens"),
            {**_listed(int), "help": "Prompts of so many random tokens; several are swept."},
        ),
        (("--max-tokens", "max_tokens"), {"type": int, "help": "Most tokens of an answer. [default: 128]"}),
        (("--output-len", "output_len"), {"type": int, "help": "Tokens of every answer, whatever the model says."}),
        (("--chat/--no-chat", "chat"), {"default": None, "help": "Texts as user messages. [default: where possible]"}),
        (("--requests", "requests"), {"type": int, "help": "Of a point in a repetition. [default: 24, or 8 a place]"}),
    ]
    for names, settings in reversed(flags):
        command = click.option(*names, **settings)(command)
    return command


def _sweep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    flags: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("--strategy", "strategies"), {"multiple": True, "help": "Repeatable; ar is always run. [default: all]"}),
        (("--concurrency", "concurrency"), {**_listed(int), "help": "Requests always in flight. [default: 1]"}),
        (("--rate", "rates"), {**_listed(float), "help": "Requests a second that arrive at random, instead."}),
        (("--draft-tokens", "draft_tokens"), {**_listed(int), "help": "Most drafts verified in a round."}),
        (("--block-size", "block_sizes"), {**_listed(int), "help": "The same, with the anchor: drafts and 1."}),
        (("--draft-policy", "policies"), {**_listed(str, "NAME,..."), "help": "fixed, adaptive. [default: fixed]"}),
        (("--temperature", "temperatures"), {**_listed(float), "help": "0 is greedy. [default: 0]"}),
        (("--seed", "seed"), {"type": click.IntRange(0), "default": 0, "help": "Of sampling, prompts, arrivals."}),
        (("--repetitions", "repetitions"), {"type": int, "help": "Of the whole. [default: 3]"}),
        (("--warmup", "warmup"), {"type": int, "help": "Turns of a point before those that count. [default: 1]"}),
    ]
    for names, settings in reversed(flags):
        command = click.option(*names, **settings)(command)
    return command


@click.command(cls=WithDiff)
@click.argument("bundle", type=FOLDER, required=False)
@click.option("--url", help="A running server: http(s)://HOST:PORT (OpenAI) or triton+grpc://HOST:PORT.")
@click.option("--metrics-url", help="Its metrics. [default: /metrics of an OpenAI server, port 8002 of Triton]")
@click.option("--api-key", envvar="DFLOW_API_KEY", help="Of an OpenAI server. [env: DFLOW_API_KEY]")
@_workload_options
@_sweep_options
@click.option("--ttft-bound", type=float, help="Milliseconds to a first token that are good enough.")
@click.option("--tpot-bound", type=float, help="Milliseconds a token after it that are good enough.")
@click.option("--price-per-hour", type=float, help="Of this machine: adds what a million tokens cost.")
@click.option("--hosted-price", type=float, help="Of a million output tokens elsewhere, to compare with.")
@click.option("--threads", type=POSITIVE, help="CPU threads. [default: all cores]")
@click.option("--roofline/--no-roofline", default=True, show_default=True, help="Measure what the machine can do.")
@click.option("--output", type=FOLDER, help="Folder for report.html, profile.json and CSV files.")
@click.option("--force", is_flag=True, help="Replace that folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def profile(
    bundle: Path | None,
    url: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a bundle on this machine, or a running server: latency, speed, where time goes, what to use.

    `dflow-trt profile diff A B` says whether two profiles are comparable, and what changed.
    """
    if bundle is None and url is None:
        raise UserError("profile: nothing to profile; give a BUNDLE, or --url of a running server")
    _load(report=output is not None, remote=url is not None)
    if output is not None and output.exists() and not force:
        raise UserError(f"--output: {output} exists; choose another, or replace it with --force")
    undo_on_sigterm()
    result = _measure(bundle, url, options)
    _write(result, output, force)
    _show(result.profile, output, as_json)
    _check(result.profile)


def _load(report: bool = False, remote: bool = False) -> None:
    """The libraries of a profile; UserError names the extra that is not installed, and what of it is missing."""
    wanted = ["pydantic", *(["matplotlib"] if report else []), *(["httpx", "tritonclient.grpc"] if remote else [])]
    extra = "profile,serve" if remote else "profile"
    with loading():
        missing = [name for name in wanted if not _imports(name)]
    if missing:
        lacks = f"the extra {extra} is not installed (no {', '.join(missing)})"
        raise UserError(f"profile: {lacks}; pip install '.[{extra}]' in the checkout")


def _imports(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def _measure(bundle: Path | None, url: str | None, given: dict[str, Any]) -> Result:
    with loading():
        from dflow_trt import console
        from dflow_trt.profiling.progress import Progress
        from dflow_trt.profiling.run import profile_bundle

    if url is not None and given["threads"] is not None:
        raise UserError("--threads: is the server's own setting; leave it out beside --url")
    choice, options, prices = _choice(given), _options(given), _prices(given)
    with Progress(console.err) as report:
        if url is not None:
            with loading():
                from dflow_trt.profiling.remote.run import profile_server

            access = {name: given[name] for name in ("metrics_url", "api_key")}
            return profile_server(url, bundle, choice, options, report, prices=prices, **access)
        assert bundle is not None
        limits = {"threads": given["threads"], "roofline": given["roofline"]}
        return profile_bundle(bundle, choice, options, report, prices=prices, **limits)


def _choice(given: dict[str, Any]) -> Choice:
    from dflow_trt.profiling.workload import Choice

    return Choice(given["file"], given["example"], given["input_lens"] or (), given["chat"])


def _options(given: dict[str, Any]) -> Options:
    """What was given; the rest as Options has it. Loads of one kind replace the default of the other."""
    from dflow_trt.profiling.points import Options

    if given["output_len"] is not None:
        if given["max_tokens"] is not None:
            raise UserError("--output-len and --max-tokens: both say how long answers are; leave out one")
        given = given | {"max_tokens": given["output_len"], "ignore_eos": True}
    if given["block_sizes"] is not None:
        if given["draft_tokens"] is not None:
            raise UserError("--block-size and --draft-tokens: both say how many drafts are verified; leave out one")
        given = given | {"draft_tokens": tuple(size - 1 for size in given["block_sizes"])}
    if given["rates"] is not None and given["concurrency"] is None:
        given = given | {"concurrency": ()}
    names = Options.__dataclass_fields__
    return Options(**{name: value for name, value in given.items() if name in names and value is not None})


def _prices(given: dict[str, Any]) -> Prices:
    from dflow_trt.profiling.prices import Prices

    return Prices(given["price_per_hour"], given["hosted_price"])


def _write(result: Result, output: Path | None, force: bool) -> None:
    if output is not None:
        with loading():
            from dflow_trt.profiling.export import write_output

        write_output(result, output, force)


def _show(profile: Profile, output: Path | None, as_json: bool) -> None:
    with loading():
        from dflow_trt import console
        from dflow_trt.profiling.table import show_profile

    if as_json:
        click.echo(profile.model_dump_json())
        return
    show_profile(profile, console.out)
    if output is not None:
        click.echo(f"report    {output / 'report.html'}")


def _check(profile: Profile) -> None:
    """After everything was shown and written: what must not go unnoticed."""
    from dflow_trt.profiling.words import lossless

    found = profile.lossless
    if found.same != found.compared:
        raise UserError(f"profile: not lossless: {lossless(found)}; please report this")
    if profile.error is not None:
        raise UserError(profile.error)
    wrong = [each for each in profile.server.counters if not each.agree] if profile.server else []
    if wrong:
        first = wrong[0]
        raise UserError(
            f"profile: the server's counters disagree: {first.counter} of {first.strategy} is {first.server:g} there, "
            f"{first.client:g} here; see that nobody else uses it, and profile again"
        )


@click.command("diff")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Say whether two profiles are comparable, and what changed from A to B (folders of --output, or their JSON)."""
    _load()
    with loading():
        from dflow_trt import console
        from dflow_trt.profiling.diff import compare, show_difference
        from dflow_trt.profiling.record import read_record

    found = compare(read_record(a), read_record(b))
    if as_json:
        click.echo(found.model_dump_json())
    else:
        show_difference(found, console.out)
    if not found.comparable:
        raise UserError(f"profile diff: not comparable: {found.settings[0]}")
