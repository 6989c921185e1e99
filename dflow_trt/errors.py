"""The one exception for what a user can put right: a single line that says what, where, what is allowed, what to do."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in input, options or files. The command line prints the message and exits 1, without a traceback."""
