"""Request bodies: read up to a limit, parsed strictly, faults named. What comes out is a valid
pydantic model or an InvalidRequest.

A field that is null counts as not given. An unknown field is refused by name, or with `lenient`
listed in a response header.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from starlette.exceptions import HTTPException

from octavo.errors import InvalidRequest
from octavo.server.service import Service, service_of

IGNORED_HEADER = "X-Octavo-Ignored-Fields"


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Fields that others know and this server does not honour."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """For the response: which fields were ignored."""
        return {IGNORED_HEADER: ", ".join(self._ignored)} if self._ignored else {}

    def take_unknown_fields(self, *, lenient: bool) -> None:
        """Refuses them, or notes that they are ignored."""
        unknown = [name for name, value in (self.model_extra or {}).items() if value is not None]
        if unknown and not lenient:
            raise self._refusal(unknown[0])
        self._ignored = [
            name.encode("ascii", "replace").decode() for name in unknown if name.isprintable()
        ]

    def _refusal(self, name: str) -> InvalidRequest:
        if name in self.unsupported:
            return InvalidRequest(f"{name}: this server does not support it", param=name)
        close = difflib.get_close_matches(name, type(self).model_fields, 1)
        return InvalidRequest(
            f"{name}: no such field",
            hint=f"did you mean {close[0]}?" if close else None,
            param=name,
        )


BodyT = TypeVar("BodyT", bound=Body)


def body_of(kind: type[BodyT]) -> Callable[..., Awaitable[BodyT]]:
    """A dependency that parses the request's body as `kind`."""

    async def parse(request: Request, service: Annotated[Service, Depends(service_of)]) -> BodyT:
        raw = await _read(request, service.settings.max_body_bytes)
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            raise _describe(kind, error) from None
        body.take_unknown_fields(lenient=service.settings.lenient)
        return body

    return parse


async def _read(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"the body is too large: allowed are at most {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _describe(kind: type[Body], error: ValidationError) -> InvalidRequest:
    """The first fault, by field. A field with a description says there what is allowed."""
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
    """messages[0].role"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
