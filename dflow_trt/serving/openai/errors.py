"""What goes wrong, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}`` and an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INVALID = "invalid_request_error"
CLIENT_GONE = 499  # nginx's number for a client that did not wait; nobody reads it but the log
# HTTP status -> (type, code), as OpenAI's servers give them where they do.
KINDS: dict[int, tuple[str, str | None]] = {
    400: (INVALID, None),
    401: (INVALID, "invalid_api_key"),
    403: (INVALID, "host_not_allowed"),
    404: (INVALID, "not_found"),
    405: (INVALID, "method_not_allowed"),
    413: (INVALID, "request_too_large"),
    415: (INVALID, "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    CLIENT_GONE: (INVALID, "client_disconnected"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "service_unavailable"),
    504: ("server_error", "timeout"),
}
# What the official clients do by themselves: again later where a queue is full, not at all where time ran out.
HEADERS: dict[int, dict[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
    504: {"x-should-retry": "false"},
}


class ApiError(Exception):
    """A request that gets an error instead of an answer. param: the field at fault, where it is one."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that the client reads."""
        kind, code = KINDS[self.status]
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code},
        }

    @property
    def headers(self) -> Mapping[str, str]:
        return HEADERS.get(self.status, {})
