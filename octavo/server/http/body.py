"""Reads request bodies within limits and parses them into pydantic models.

A body is JSON if it declares a content type. Null counts as not given. Unknown fields at any depth
are ignored and reported (`ignored.py`), or rejected with --strict.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from fastapi import Depends, Request
from pydantic import PrivateAttr, ValidationError
from starlette.exceptions import HTTPException

from octavo.api.errors import InvalidRequest
from octavo.server.fields import check_interactions
from octavo.server.http.body_part import BodyPart, note_ignored
from octavo.server.ignored import SCOPE_KEY, IgnoredFields
from octavo.server.settings import ServerSettings
from octavo.server.state.service import Service, get_service

MAX_OBJECTS = 100_000
"""Maximum number of objects ({}); parsing one takes about 4 us."""
QUOTE, COMMA, BRACE = b'",{'
CURLS_TYPE = "application/x-www-form-urlencoded"
"""Default content type of `curl -d`, used in the examples of Ollama's documentation."""
BROWSERS_HEADERS = ("sec-fetch-site", "origin")
"""Headers of which a browser sends at least one with every request that is not a plain GET."""
PLAIN_ENCODING = "identity"
MAX_QUOTED = 80
"""Maximum length of client text quoted in an error, in characters."""


class Body(BodyPart):
    stream_type: ClassVar[str | None] = "text/event-stream"
    """Media type of the response with `stream`; None if the route does not stream."""

    is_strict: ClassVar[bool] = False
    """Whether unknown fields are rejected even without --strict. Set for operator routes: they
    change the server's state and have no third-party clients.
    """

    _ignored: IgnoredFields = PrivateAttr(default_factory=IgnoredFields)

    @property
    def ignored(self) -> IgnoredFields:
        """Collects the ignored fields of this request."""
        return self._ignored

    def note_unknown_fields(self, ignored: IgnoredFields) -> None:
        """Records the body's unknown fields in `ignored`, to which later code adds further ignored
        fields.
        """
        self._ignored = ignored
        note_ignored(self, ignored)


BodyT = TypeVar("BodyT", bound=Body)


def body_bytes(request: Request) -> int:
    """Returns the length of a request's body, after `parse_body` has read it."""
    length: int = request.state.num_body_bytes
    return length


def parse_body(kind: type[BodyT]) -> Callable[..., Awaitable[BodyT]]:
    """Returns a FastAPI dependency that parses the body as `kind`."""

    async def parse(request: Request, service: Annotated[Service, Depends(get_service)]) -> BodyT:
        _check_content(request)
        raw = await read_in_time(request, service.settings)
        request.state.num_body_bytes = len(raw)
        check_json_size(raw, service.settings.max_body_values)
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            raise _describe(kind, error) from None
        body.note_unknown_fields(get_ignored(request, is_strict=kind.is_strict))
        check_interactions(body, body.ignored)
        return body

    reader: Any = parse
    reader.kind = kind  # read by `openapi.describe`
    return parse


def get_ignored(request: Request, *, is_strict: bool = False) -> IgnoredFields:
    """Returns the collector of a request's ignored fields, the same as `body.ignored`."""
    settings: ServerSettings = request.app.state.service.settings
    ignored = IgnoredFields(is_strict=is_strict or settings.strict)
    collector: IgnoredFields = request.scope.setdefault(SCOPE_KEY, ignored)
    return collector


def parse_media_type(content_type: str) -> str:
    """Returns the media type of a Content-Type header, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def _check_content(request: Request) -> None:
    """Raises a 415 unless the body is declared as uncompressed JSON.

    A missing type and the default type of `curl -d` are accepted, except from a browser: any web
    page could send such a request to a local server.
    """
    encoding = request.headers.get("content-encoding", PLAIN_ENCODING)
    if encoding.strip().lower() != PLAIN_ENCODING:
        raise HTTPException(
            415,
            f"Content-Encoding: got {_short(encoding)}, expected none: send the body as it is",
            {"Accept-Encoding": PLAIN_ENCODING},
        )
    declared = request.headers.get("content-type")
    is_browser = any(name in request.headers for name in BROWSERS_HEADERS)
    if declared is None and not is_browser:
        return
    declared = declared or "none"
    media_type = parse_media_type(declared)
    if media_type == CURLS_TYPE and not is_browser:
        return
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(
            415,
            f"Content-Type: got {_short(declared)}, expected application/json (hint: send the"
            " header Content-Type: application/json)",
        )


async def read_in_time(request: Request, settings: ServerSettings) -> bytes:
    """Reads the body; on timeout, raises a 408 and closes the connection."""
    timeout_s = settings.request_timeout_s
    _check_length(request, settings.max_body_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise HTTPException(
            408,
            f"the body did not arrive within {timeout_s} seconds",
            headers={"Connection": "close"},
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    """Reads the body; raises a 413 beyond the limit."""
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit, {})
        parts.append(part)
    return b"".join(parts).removeprefix(codecs.BOM_UTF8)


def _check_length(request: Request, limit: int) -> None:
    """Raises a 413 based on Content-Length, before a client with `Expect` sends the body.

    Other clients send the body without waiting and would miss the response if the connection were
    closed.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit, {"Connection": "close"} if "expect" in request.headers else {})


def _too_large(limit: int, headers: dict[str, str]) -> HTTPException:
    return HTTPException(413, f"the body is too large: expected at most {limit} bytes", headers)


def _describe(kind: type[Body], error: ValidationError) -> InvalidRequest:
    """Returns the first validation error; the field's description gives the allowed values."""
    faults = error.errors(include_url=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    if not first["loc"]:
        return InvalidRequest("the body is not a JSON object")
    param = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param}: field required", param=param)
    field = kind.model_fields.get(str(first["loc"][0]))
    if field is None or field.description is None:
        return InvalidRequest(
            f"{param}: got {_short(first['input'])}, {first['msg'][:1].lower()}{first['msg'][1:]}",
            param=param,
        )
    nearest = min(
        (fault for fault in faults if fault["loc"][0] == first["loc"][0]),
        key=lambda fault: len(fault["loc"]),
    )
    param = str(first["loc"][0])
    return InvalidRequest(
        f"{param}: got {_short(nearest['input'])}, expected {field.description}", param=param
    )


def _path(location: tuple[int | str, ...]) -> str:
    """Formats a location as a path, such as messages[0].role."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{_truncate(part)}"
    return text.removeprefix(".")


def _short(value: Any) -> str:
    return _truncate(repr(value))


def _truncate(text: str) -> str:
    """Truncates client text for an error."""
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def check_json_size(raw: bytes, max_values: int) -> None:
    """Raises a 413 if a body has more than `max_values` values, or too many objects.

    Parsing a body of many small values takes seconds, during which the interpreter serves no
    other request. Long strings are cheap.
    """
    if raw.count(COMMA) <= min(max_values, MAX_OBJECTS):
        return  # every value follows a comma, except the first one in a list or an object
    num_values, num_objects = _counts(raw)
    for count, allowed, what in (
        (num_values, max_values, "values"),
        (num_objects, MAX_OBJECTS, "objects"),
    ):
        if count > allowed:
            raise HTTPException(
                413,
                f"the body holds too many {what}: got {count}, expected at most {allowed}",
            )


def _counts(raw: bytes) -> tuple[int, int]:
    """Returns the numbers of values (without the first of each list or object) and objects."""
    unescaped = raw.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    symbols = np.frombuffer(unescaped, np.uint8)
    # The sum wraps at 256, which does not change its parity.
    is_outside = np.cumsum(symbols == QUOTE, dtype=np.uint8) % 2 == 0
    return (
        int(np.count_nonzero((symbols == COMMA) & is_outside)),
        int(np.count_nonzero((symbols == BRACE) & is_outside)),
    )
