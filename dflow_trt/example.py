"""The example pair that ships with the package."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

from dflow_trt.errors import UserError

DATA = "example_data"


def write_example(folder: Path) -> list[str]:
    """Copy the example's parts into ``folder`` (created); parts that are there already are refused, not replaced."""
    data = files("dflow_trt") / DATA
    if not data.is_dir():
        raise UserError("example: this installation has no example data; install the dflow-trt wheel again")
    with as_file(data) as source:
        names = sorted(entry.name for entry in source.iterdir())
        for name in names:
            if (folder / name).exists():
                raise UserError(f"{folder / name} exists already; choose another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
                copy(source / name, folder / name)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}; choose a folder that can be written") from None
    return names
