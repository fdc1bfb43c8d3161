"""A form with one file, as multipart/form-data: the file goes to the disk while it arrives.

Owns the limits of its parts; those of a part's headers are the parser's. Source of the format:
RFC 7578, parsed by python-multipart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.exceptions import HTTPException

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES = 1024
MAX_PARTS = 16
FILE_FIELD = "file"


class FormFile(Protocol):
    """Takes the bytes of a form's file."""

    @property
    def num_bytes(self) -> int: ...

    async def write(self, data: bytes) -> None: ...


@dataclass(slots=True)
class UploadForm:
    """The form's fields, and the name of its file; None where none has come."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None


@dataclass(slots=True)
class _Part:
    """A part that arrives."""

    header_name: bytes = b""
    header_value: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    is_file: bool = False
    value: bytes = b""


class _FormReader:
    """Takes the parser's calls: gathers fields, and hands on the file's bytes."""

    def __init__(self) -> None:
        self.form = UploadForm()
        self.data: list[bytes] = []
        """Bytes of the file that have come since they were last taken."""
        self.has_ended = False
        self._part = _Part()
        self._num_parts = 0

    def callbacks(self) -> MultipartCallbacks:
        """Returns what the parser calls."""
        return {
            "on_part_begin": self.on_part_begin,
            "on_header_field": self.on_header_field,
            "on_header_value": self.on_header_value,
            "on_header_end": self.on_header_end,
            "on_headers_finished": self.on_headers_finished,
            "on_part_data": self.on_part_data,
            "on_part_end": self.on_part_end,
            "on_end": self.on_end,
        }

    def on_part_begin(self) -> None:
        self._part = _Part()
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has too many parts: allowed are {MAX_PARTS}")

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def on_header_end(self) -> None:
        part = self._part
        part.headers[part.header_name.lower()] = part.header_value
        part.header_name, part.header_value = b"", b""

    def on_headers_finished(self) -> None:
        disposition = self._part.headers.get(b"content-disposition", b"")
        kind, options = parse_options_header(disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("the form has a part without a name")
        self._part.name = options[b"name"].decode("utf-8", "replace")
        self._part.is_file = b"filename" in options
        if not self._part.is_file:
            return
        if self._part.name != FILE_FIELD or self.form.file_name is not None:
            raise InvalidRequest(
                f"{self._part.name}: a form has one file, named {FILE_FIELD!r}",
                param=self._part.name[:200],
            )
        self.form.file_name = options[b"filename"].decode("utf-8", "replace")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self.data.append(data[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"{self._part.name}: too long, allowed are {MAX_FIELD_BYTES} bytes",
                param=self._part.name[:200],
            )

    def on_part_end(self) -> None:
        if not self._part.is_file:
            self.form.fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.has_ended = True


async def receive_form(
    request: Request, writer: FormFile, *, max_bytes: int, timeout_s: float
) -> UploadForm:
    """Writes the form's file and returns the rest; raises for a form that is malformed, too large
    or slower than `timeout_s` from one piece to the next.
    """
    reader = _FormReader()
    parser = MultipartParser(_boundary(request), reader.callbacks())
    pieces = request.stream().__aiter__()
    while (piece := await _next(pieces, timeout_s)) is not None:
        _parse(parser, piece)
        for data in reader.data:
            if writer.num_bytes + len(data) > max_bytes:
                raise HTTPException(
                    413, f"the file is too large: allowed are at most {max_bytes} bytes"
                )
            await writer.write(data)
        reader.data.clear()
    if not reader.has_ended:
        raise InvalidRequest("the form ends before its last boundary")
    return reader.form


def _parse(parser: MultipartParser, piece: bytes) -> None:
    try:
        parser.write(piece)
    except MultipartParseError as error:
        raise InvalidRequest(f"the form is malformed: {error}") from None


async def _next(pieces: AsyncIterator[bytes], timeout_s: float) -> bytes | None:
    """Returns the next piece of the body; None at its end, a 408 where it does not come."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(pieces, None)
    except TimeoutError:
        raise HTTPException(
            408,
            f"nothing of the body arrived for {timeout_s:g} seconds",
            headers={"Connection": "close"},
        ) from None


def _boundary(request: Request) -> bytes:
    declared = request.headers.get("content-type", "")
    kind, options = parse_options_header(declared)
    if kind != b"multipart/form-data":
        raise HTTPException(
            415,
            f"Content-Type: got {declared[:80]!r}, allowed is multipart/form-data",
        )
    boundary: bytes = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise InvalidRequest("Content-Type: its boundary has 1 to 70 characters")
    return boundary
