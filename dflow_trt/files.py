"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflow_trt.errors import UserError


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A place to write a file, which takes the name ``path`` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def staged_folder(path: Path, replace: bool, todo: str = "nothing was replaced, choose another") -> Iterator[Path]:
    """A folder to fill, which takes the name ``path`` when the block ends without an error.

    With ``replace`` an older one steps aside and is removed last. UserError, which ends
    with ``todo``, where another process filled it meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    old = partial.with_name(partial.name + "-old")
    try:
        partial.mkdir()
        yield partial
        if replace and path.exists():
            path.rename(old)
        partial.rename(path)
    except BaseException as error:
        if old.exists() and not path.exists():
            old.rename(path)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UserError(f"--output: {path} was filled meanwhile; {todo}") from None
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
