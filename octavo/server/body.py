"""Request bodies: read within limits, parsed strictly into a pydantic model, faults named.

A body is JSON by its Content-Type, or has none. A field that is null counts as not given. An
unknown field is refused by name, or with `lenient` listed in a response header.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic_core import CoreSchema
from starlette.exceptions import HTTPException

from octavo.errors import InvalidRequest
from octavo.server.error_forms import form_of, ollama_form
from octavo.server.fields import check_interactions
from octavo.server.json_size import check_json_size
from octavo.server.settings import ServerSettings
from octavo.server.state.service import Service, service_of

IGNORED_HEADER = "X-Octavo-Ignored-Fields"
CURLS_TYPE = "application/x-www-form-urlencoded"
"""Type that `curl -d` declares by itself, as it does in the examples of Ollama's documents."""
BROWSERS_HEADERS = ("sec-fetch-site", "origin")
"""Headers of which a browser sends at least one with every request that is not a plain GET."""
PLAIN_ENCODING = "identity"
"""Content-Encoding of a body that is not compressed."""
MAX_QUOTED = 80
"""Most characters of a client's text that an error repeats."""


def _end_at_first_fault(schema: Any) -> None:
    """Makes all lists of a pydantic schema stop at their first fault."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_fault(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _end_at_first_fault(part)


class BodyPart(BaseModel):
    """Base of all request bodies and of the objects in them: strict types, finite numbers, unknown
    fields kept aside. A list is refused at its first fault: a body may hold a million of them.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_at_first_fault(handler.resolve_ref_schema(schema))
        return schema


class Body(BodyPart):
    """Base of all request bodies."""

    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that other servers know and this one does not honour."""

    stream_type: ClassVar[str | None] = "text/event-stream"
    """Media type of the answer where a field `stream` asks for one; None where none may."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that name the ignored fields."""
        return {IGNORED_HEADER: ", ".join(self._ignored)} if self._ignored else {}

    def take_unknown_fields(self, *, lenient: bool, dropped: Sequence[str] = ()) -> None:
        """Refuses unknown fields; with `lenient` notes them as ignored, and the dropped ones."""
        unknown = [name for name, value in (self.model_extra or {}).items() if value is not None]
        if unknown and not lenient:
            raise self._refusal(unknown[0])
        self._ignored = [
            _clipped(name).encode("ascii", "replace").decode()
            for name in (*unknown, *dropped)
            if name.isprintable()
        ]

    def _refusal(self, name: str) -> InvalidRequest:
        name = _clipped(name)
        if name in self.unsupported:
            return InvalidRequest(f"{name}: this server does not support it", param=name)
        close = difflib.get_close_matches(name, type(self).model_fields, 1)
        return InvalidRequest(
            f"{name}: no such field",
            hint=f"did you mean {close[0]}?" if close else None,
            param=name,
        )


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
        lenient, dropped = service.settings.lenient, []
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            dropped = _inert_faults(kind, error) if lenient else []
            if not dropped:
                raise _describe(kind, error) from None
            body = _without(kind, raw, dropped)
        body.take_unknown_fields(lenient=lenient, dropped=dropped)
        check_interactions(body)
        return body

    reader: Any = parse
    reader.kind = kind  # read by `openapi.describe`
    return parse


def _check_content(request: Request) -> None:
    """Raises 415 where the body is declared as anything but plain JSON. One without a type is
    taken, or with curl's on Ollama's routes, but not from a browser, where any page could send it
    to a server on its user's machine.
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
    if media_type == CURLS_TYPE and not is_browser and form_of(request.scope) is ollama_form:
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
    return b"".join(parts)


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


def _inert_faults(kind: type[Body], error: ValidationError) -> list[str]:
    """Returns the fields with values that are not allowed, where all of them change nothing here
    whatever their value; [] where there are others.
    """
    faulty = list(dict.fromkeys(str(fault["loc"][0]) for fault in error.errors() if fault["loc"]))
    inert = [
        name
        for name in faulty
        if (info := kind.model_fields.get(name)) is not None
        and isinstance(info.json_schema_extra, dict)
        and info.json_schema_extra.get("inert")
    ]
    return faulty if faulty == inert else []


def _without(kind: type[BodyT], raw: bytes, names: Sequence[str]) -> BodyT:
    """Parses a body without some of its fields."""
    fields = {name: value for name, value in json.loads(raw).items() if name not in names}
    return kind.model_validate_json(json.dumps(fields))


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
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param}: no such field", param=param)
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
