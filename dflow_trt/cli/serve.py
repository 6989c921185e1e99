"""``dflow-trt serve``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dflow_trt.cli.common import FOLDER, POSITIVE, serving_options
from dflow_trt.cli.interrupts import loading, undo_on_sigterm
from dflow_trt.errors import UserError
from dflow_trt.spec import DraftPolicy

PORT = click.IntRange(0, 65535)
SECONDS = click.FloatRange(0, min_open=True)
NEEDS = "pip install '.[triton,serve]' in the checkout"


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the endpoint.")
@click.option("--port", type=PORT, default=8000, show_default=True, help="Of the endpoint; 0 takes a free one.")
@click.option("--model-name", help="What clients call the model. [default: the folder's name]")
@click.option("--api-key", envvar="DFLOW_API_KEY", help="What clients must send. [default: DFLOW_API_KEY, or none]")
@click.option("--max-request-bytes", type=POSITIVE, default=4 << 20, show_default=True, help="Longest body taken.")
@click.option(
    "--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds a request may take, waiting included."
)
@serving_options
@click.option("--triton-home", type=FOLDER, help="Folder of tritonserver. [default: DFLOW_TRITON_HOME, pip's, or PATH]")
@click.option("--http-port", type=PORT, default=0, help="Of Triton itself, on loopback. [default: a free one]")
@click.option("--grpc-port", type=PORT, default=0, help="[default: a free one]")
@click.option("--metrics-port", type=PORT, default=0, help="[default: a free one]")
@click.option("--verbose", is_flag=True, help="Show what tritonserver logs, beside warnings and errors.")
def serve(
    bundle: Path,
    host: str,
    port: int,
    model_name: str | None,
    api_key: str | None,
    max_request_bytes: int,
    timeout: float,
    max_queue: int,
    strategy: str | None,
    shares: Sequence[str],
    draft_policy: DraftPolicy,
    threads: int | None,
    triton_home: Path | None,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    verbose: bool,
) -> None:
    """Serve a bundle: a tritonserver, and an OpenAI-compatible endpoint in front of it."""
    with loading():
        try:
            from dflow_trt.serving.package import PackageOptions, read_share
            from dflow_trt.serving.serve import ServeOptions, serve
            from dflow_trt.serving.server import Ports
        except ModuleNotFoundError as error:
            raise UserError(f"serve needs {error.name}, which is not installed; {NEEDS}") from None

    undo_on_sigterm()  # until the endpoint is there, which ends in its own way
    package = PackageOptions(
        max_queue=max_queue,
        timeout=timeout,
        draft_policy=draft_policy,
        strategy=strategy,
        shares=dict(map(read_share, shares)),
        threads=threads,
    )
    options = ServeOptions(
        host=host,
        port=port,
        model_name=model_name,
        api_key=api_key,
        max_request_bytes=max_request_bytes,
        timeout=timeout,
        triton_home=triton_home,
        ports=Ports(http_port, grpc_port, metrics_port),
        verbose=verbose,
        package=package,
    )
    serve(bundle, options, say=click.echo)
