"""Request bodies: read within limits, parsed into a pydantic model, faults named.

A body is JSON by its Content-Type, or has none. A field that is null counts as not given. An
unknown field, at any depth, is ignored and reported (`ignored.py`), or with --strict refused.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Depends, Request
from pydantic import PrivateAttr, ValidationError
from starlette.exceptions import HTTPException

from octavo.api.errors import InvalidRequest
from octavo.server.fields import check_interactions
from octavo.server.http.body_part import BodyPart, note_ignored
from octavo.server.http.json_size import check_json_size
from octavo.server.ignored import SCOPE_KEY, IgnoredFields
from octavo.server.settings import ServerSettings
from octavo.server.state.service import Service, service_of

CURLS_TYPE = "application/x-www-form-urlencoded"
"""Type that `curl -d` declares by itself, as it does in the examples of Ollama's documents."""
BROWSERS_HEADERS = ("sec-fetch-site", "origin")
"""Headers of which a browser sends at least one with every request that is not a plain GET."""
PLAIN_ENCODING = "identity"
"""Content-Encoding of a body that is not compressed."""
MAX_QUOTED = 80
"""Most characters of a client's text that an error repeats."""


class Body(BodyPart):
    """Base of all request bodies."""

    stream_type: ClassVar[str | None] = "text/event-stream"
    """Media type of the answer where a field `stream` asks for one; None where none may."""

    is_strict: ClassVar[bool] = False
    """Whether unknown fields are refused without --strict too: on the operator's routes, which
    change the server's state and which no foreign client calls.
    """

    _ignored: IgnoredFields = PrivateAttr(default_factory=IgnoredFields)

    @property
    def ignored(self) -> IgnoredFields:
        """Collects the fields of this request that are not honoured."""
        return self._ignored

    def take_unknown_fields(self, ignored: IgnoredFields) -> None:
        """Notes what the body holds that this server does not know, and collects further fields in
        `ignored` from here on.
        """
        self._ignored = ignored
        note_ignored(self, ignored)


BodyT = TypeVar("BodyT", bound=Body)


def body_bytes(request: Request) -> int:
    """Returns the length of a request's body, once `body_of` has read it."""
    length: int = request.state.num_body_bytes
    return length


def body_of(kind: type[BodyT]) -> Callable[..., Awaitable[BodyT]]:
    """Returns a dependency that parses the request's body as `kind`."""

    async def parse(request: Request, service: Annotated[Service, Depends(service_of)]) -> BodyT:
        _check_content(request)
        raw = await read_in_time(request, service.settings)
        request.state.num_body_bytes = len(raw)
        check_json_size(raw, service.settings.max_body_values)
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            raise _describe(kind, error) from None
        body.take_unknown_fields(get_ignored(request, is_strict=kind.is_strict))
        check_interactions(body, body.ignored)
        return body

    reader: Any = parse
    reader.kind = kind  # read by `openapi.describe`
    return parse


def get_ignored(request: Request, *, is_strict: bool = False) -> IgnoredFields:
    """Returns the collector of a request's ignored fields; `body.ignored` is the same."""
    settings: ServerSettings = request.app.state.service.settings
    ignored = IgnoredFields(is_strict=is_strict or settings.strict)
    found: IgnoredFields = request.scope.setdefault(SCOPE_KEY, ignored)
    return found


def _check_content(request: Request) -> None:
    """Raises 415 if the body is declared as anything but plain JSON. A body without a type, or with
    the type that `curl -d` sends, is accepted except from a browser, in which any page could send
    it to a server on its user's machine.
    """
    encoding = request.headers.get("content-encoding", PLAIN_ENCODING)
    if encoding.strip().lower() != PLAIN_ENCODING:
        raise HTTPException(
            415,
            f"Content-Encoding: got {_short(encoding)}, allowed is none: send the body as it is",
            {"Accept-Encoding": PLAIN_ENCODING},
        )
    declared = request.headers.get("content-type")
    is_browser = any(name in request.headers for name in BROWSERS_HEADERS)
    if declared is None and not is_browser:
        return
    declared = declared or "none"
    media_type = declared.partition(";")[0].strip().lower()
    if media_type == CURLS_TYPE and not is_browser:
        return
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(
            415,
            f"Content-Type: got {_short(declared)}, allowed is application/json (hint: send the"
            " header Content-Type: application/json)",
        )


async def read_in_time(request: Request, settings: ServerSettings) -> bytes:
    """Reads the body; raises 408, and closes the connection, where it does not come in time."""
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
    """Returns the body's bytes; raises 413 beyond the limit."""
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit, {})
        parts.append(part)
    return b"".join(parts).removeprefix(codecs.BOM_UTF8)


def _check_length(request: Request, limit: int) -> None:
    """Raises 413 for a body that says that it is too large, before a client is told to send it.

    One that sends it unasked does so to its end, and would not see an answer behind which the
    connection is closed.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit, {"Connection": "close"} if "expect" in request.headers else {})


def _too_large(limit: int, headers: dict[str, str]) -> HTTPException:
    return HTTPException(413, f"the body is too large: allowed are at most {limit} bytes", headers)


def _describe(kind: type[Body], error: ValidationError) -> InvalidRequest:
    """Returns the first fault by field; a field's description says what is allowed."""
    faults = error.errors(include_url=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    if not first["loc"]:
        return InvalidRequest("the body is not a JSON object")
    param = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param}: needed, and not given", param=param)
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
        f"{param}: got {_short(nearest['input'])}, allowed is {field.description}", param=param
    )


def _path(location: tuple[int | str, ...]) -> str:
    """Returns a location as a path, such as messages[0].role."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{_clipped(part)}"
    return text.removeprefix(".")


def _short(value: Any) -> str:
    return _clipped(repr(value))


def _clipped(text: str) -> str:
    """Returns a client's text as an error quotes it: its beginning, where it is long."""
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."
