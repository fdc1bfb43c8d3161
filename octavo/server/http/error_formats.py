"""Error bodies of each API, and the choice of the API for a request.

Sources: the APIs' own references.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.types import Scope


@dataclass(frozen=True, slots=True)
class Overflow:
    """Token counts of a prompt that is too long; clients use them to shorten a conversation."""

    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as reported to clients."""

    message: str
    kind: str
    """OpenAI's error type."""
    status: int
    param: str | None = None
    """Invalid field, if any."""
    overflow: Overflow | None = None
    """Set for a prompt that is too long."""


ErrorFormat: TypeAlias = Callable[[Fault], dict[str, Any]]

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status; others are invalid_request_error (below 500) or api_error."""


OVERFLOW_CODE = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long."""


def format_openai_error(fault: Fault) -> dict[str, Any]:
    error: dict[str, Any] = {
        "message": fault.message,
        "type": fault.kind,
        "param": fault.param,
        "code": fault.status,
    }
    if fault.overflow is not None:
        error |= {
            "message": openai_overflow(fault.message, fault.overflow),
            "type": "invalid_request_error",
            "code": OVERFLOW_CODE,
        }
    return {"error": error}


def openai_overflow(message: str, overflow: Overflow) -> str:
    """Adds the phrases that OpenAI clients recognize as "prompt too long"."""
    known = "This model's maximum context length is"
    if not message.startswith(known):
        message = f"{known} {overflow.max_tokens} tokens here. {message}"
    return f"{message}. Please reduce the length of the prompt."


def format_responses_error(fault: Fault) -> dict[str, Any]:
    """Returns OpenAI's body for the Responses route, which uses different phrases for a prompt that
    is too long.
    """
    body = format_openai_error(fault)
    if fault.overflow is not None:
        body["error"]["message"] = responses_overflow(fault.message, fault.overflow)
        body["error"]["param"] = "input"
    return body


def responses_overflow(message: str, overflow: Overflow) -> str:
    known = "Your input exceeds the context window of this model."
    return f"{known} {openai_overflow(message, overflow)}"


def format_anthropic_error(fault: Fault) -> dict[str, Any]:
    default_kind = "invalid_request_error" if fault.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(fault.status, default_kind)
    message = fault.message
    if fault.overflow is not None:
        num, limit = fault.overflow.num_tokens, fault.overflow.max_tokens
        message = f"prompt is too long: {num} tokens > {limit} maximum"
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}


def format_ollama_error(fault: Fault) -> dict[str, Any]:
    if fault.overflow is None:
        return {"error": fault.message}
    num, limit = fault.overflow.num_tokens, fault.overflow.max_tokens
    return {
        "error": "the input length exceeds the context length:"
        f" request ({num} tokens) exceeds the available context size ({limit} tokens)"
    }


def format_cohere_error(fault: Fault) -> dict[str, Any]:
    if fault.overflow is None:
        return {"message": fault.message}
    num, limit = fault.overflow.num_tokens, fault.overflow.max_tokens
    return {
        "message": f"too many tokens: the prompt cannot exceed {limit} tokens - received {num}."
        " Try using a shorter prompt."
    }


FORMATS: tuple[tuple[str, ErrorFormat], ...] = (
    ("/v1/messages", format_anthropic_error),
    ("/v1/responses", format_responses_error),
    ("/api/", format_ollama_error),
    ("/v2/", format_cohere_error),
    ("/cohere/", format_cohere_error),
    ("/v1/chat/", format_openai_error),
    ("/v1/completions", format_openai_error),
)
"""Pairs of (path prefix, error format); all other paths use OpenAI's format."""

VERSION_HEADER = "anthropic-version"
"""Header that identifies Anthropic clients on paths that also exist in OpenAI's API."""


def get_error_format(scope: Scope) -> ErrorFormat:
    """Returns the error format that the client expects."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    for beginning, form in FORMATS:
        if path.startswith(beginning):
            return form
    return format_anthropic_error if VERSION_HEADER in Headers(scope=scope) else format_openai_error
