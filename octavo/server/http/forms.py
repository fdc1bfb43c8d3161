"""Reads multipart/form-data with one file, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from octavo.server.http.body import parse_media_type

MAX_FIELDS = 15
MAX_FIELD_BYTES = 1024
MAX_OTHER_BYTES = 256 << 10
"""Maximum size of a form besides its file, in bytes."""
FILE_FIELD = "file"


@asynccontextmanager
async def open_form(
    request: Request, *, max_bytes: int, timeout_s: float
) -> AsyncIterator[FormData]:
    """Parses a form with a file of at most `max_bytes`; closes the file at the end.

    Raises HTTPException for a form that is malformed or too large, or if no data arrives for
    `timeout_s`.
    """
    declared = request.headers.get("content-type", "")
    if parse_media_type(declared) != "multipart/form-data":
        raise HTTPException(
            415, f"Content-Type: got {declared[:80]!r}, expected multipart/form-data"
        )
    too_large = HTTPException(413, f"the file is too large: expected at most {max_bytes} bytes")
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        try:
            async with asyncio.timeout(timeout_s):
                message = await request.receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"no data of the body arrived for {timeout_s:g} seconds",
                headers={"Connection": "close"},
            ) from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes + MAX_OTHER_BYTES:
            raise too_large
        return message

    async with Request(request.scope, receive).form(
        max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    ) as form:
        file = get_file(form)
        if file is not None and (file.size or 0) > max_bytes:
            raise too_large
        yield form


def get_file(form: FormData) -> UploadFile | None:
    file = form.get(FILE_FIELD)
    return file if isinstance(file, UploadFile) else None


def get_fields(form: FormData) -> dict[str, str]:
    """Returns the fields of a form other than its file."""
    return {name: value for name, value in form.items() if isinstance(value, str)}
