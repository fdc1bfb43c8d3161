"""Reads and validates a batch's input file, which contains one request per line.

Source: OpenAI's batch API.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

MAX_ERRORS = 100
"""Maximum number of errors reported for a file."""
MAX_ID = 512
"""Maximum length of a custom_id in characters."""
LINES_AT_ONCE = 64
OWN_FIELDS = ("stream", "priority", "background")
"""Fields that a batch request may not set: it is not streamed and has the lowest priority."""


class LineForm(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int
    """Line number, starting at 1."""
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineError:
    """An error in an input file, as reported by the batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def public(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "line": self.line,
            "message": self.message,
            "param": self.param,
        }


class BadLine(Exception):
    def __init__(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.error = LineError(code, message, line, param)


@dataclass(slots=True)
class CheckedInput:
    """Result of validating an input file."""

    num_lines: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)

    def take(self, raw: bytes, number: int, limits: InputLimits, seen: set[str]) -> None:
        """Adds a line; raises BadLine if it is invalid or repeats an id in `seen`."""
        if self.num_lines == limits.max_lines:
            message = f"the file has more than {limits.max_lines} requests"
            raise BadLine("too_many_requests", message)
        self.num_lines += 1
        custom_id, model = _check_line(raw, number, limits)
        if custom_id in seen:
            message = f"custom_id: {custom_id!r} is used by an earlier line"
            raise BadLine("duplicate_custom_id", message, number, "custom_id")
        if seen and model != self.model:
            message = f"body.model: got {model!r}, expected one model in all lines"
            raise BadLine("mismatched_model", message, number, "body.model")
        seen.add(custom_id)
        self.model = model


@dataclass(frozen=True, slots=True)
class InputLimits:
    endpoint: str
    """Route of all requests."""
    max_lines: int
    max_line_bytes: int


def check_input(path: Path, limits: InputLimits) -> CheckedInput:
    """Validates a complete file; a batch with any error does not run."""
    checked = CheckedInput()
    if not path.is_file():
        checked.errors.append(LineError("missing_file", "the file no longer exists"))
        return checked
    seen: set[str] = set()
    for number, raw in _number_lines(path, limits.max_line_bytes):
        try:
            checked.take(raw, number, limits, seen)
        except BadLine as bad:
            checked.errors.append(bad.error)
            if bad.error.line is None or len(checked.errors) >= MAX_ERRORS:
                return checked
    if not checked.num_lines:
        checked.errors.append(LineError("empty_file", "the file contains no requests"))
    return checked


async def read_lines(path: Path, max_line_bytes: int) -> AsyncIterator[BatchLine]:
    """Yields the lines of a validated file."""
    numbered = _number_lines(path, max_line_bytes)
    while some := await asyncio.to_thread(lambda: list(islice(numbered, LINES_AT_ONCE))):
        for number, raw in some:
            line = msgspec.json.decode(raw, type=LineForm)
            yield BatchLine(number, line.custom_id, bytes(line.body))


def _number_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields (number, text) of non-blank lines; too long lines are truncated."""
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(max_line_bytes + 1):
            number += 1
            while not raw.endswith(b"\n") and (rest := file.readline(max_line_bytes)):
                raw = raw[: max_line_bytes + 1]
                if rest.endswith(b"\n"):
                    break
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip():
                yield number, raw


def _check_line(raw: bytes, number: int, limits: InputLimits) -> tuple[str, str | None]:
    """Returns (custom_id, model) of a line; model may be None. Raises BadLine."""
    if len(raw) > limits.max_line_bytes:
        raise BadLine(
            "line_too_long", f"longer than the {limits.max_line_bytes} bytes allowed", number
        )
    try:
        line = msgspec.json.decode(raw, type=LineForm)
        body = msgspec.json.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"not a JSON request: {error}", number) from None
    for name, is_right, allowed in (
        ("custom_id", 1 <= len(line.custom_id) <= MAX_ID, f"1 to {MAX_ID} characters"),
        ("method", line.method == "POST", "'POST'"),
        ("url", line.url == limits.endpoint, f"the batch's endpoint {limits.endpoint!r}"),
    ):
        if not is_right:
            message = f"{name}: got {getattr(line, name)[:80]!r}, expected {allowed}"
            raise BadLine(f"invalid_{name}", message, number, name)
    return line.custom_id, _get_model(body, number)


def _get_model(body: Any, number: int) -> str | None:
    """Returns the model in a request body, None if the body names none; raises BadLine for an
    invalid body.
    """
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body: not a JSON object", number, "body")
    for name in OWN_FIELDS:
        if body.get(name):
            message = f"body.{name}: not supported in a batch"
            raise BadLine("invalid_body", message, number, f"body.{name}")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadLine("invalid_body", "body.model: not a string", number, "body.model")
    return model
