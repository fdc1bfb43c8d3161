"""The bodies in which each API tells of an error, and which API a request speaks.

Knows no error class; `errors.py` says what went wrong. Sources: the APIs' own references.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.types import Scope


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as clients are told of it."""

    message: str
    kind: str
    """OpenAI's type of the error."""
    status: int
    param: str | None = None
    """Offending field, where there is one."""


ErrorForm: TypeAlias = Callable[[Fault], dict[str, Any]]

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types by status; others are invalid_request_error below 500, else api_error."""


def openai_form(fault: Fault) -> dict[str, Any]:
    return {
        "error": {
            "message": fault.message,
            "type": fault.kind,
            "param": fault.param,
            "code": fault.status,
        }
    }


def anthropic_form(fault: Fault) -> dict[str, Any]:
    usual = "invalid_request_error" if fault.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(fault.status, usual)
    error = {"type": kind, "message": fault.message}
    return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}


def ollama_form(fault: Fault) -> dict[str, Any]:
    return {"error": fault.message}


def cohere_form(fault: Fault) -> dict[str, Any]:
    return {"message": fault.message}


FORMS: tuple[tuple[str, ErrorForm], ...] = (
    ("/v1/messages", anthropic_form),
    ("/api/", ollama_form),
    ("/v2/", cohere_form),
    ("/cohere/", cohere_form),
)
"""Rows of (beginning of a path, the form of its API); every other path speaks OpenAI's."""

VERSION_HEADER = "anthropic-version"
"""Header by which Anthropic's clients are known on paths that are OpenAI's too."""


def form_of(scope: Scope) -> ErrorForm:
    """Returns the form that the sender of a request expects."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    for beginning, form in FORMS:
        if path.startswith(beginning):
            return form
    return anthropic_form if VERSION_HEADER in Headers(scope=scope) else openai_form
