"""/v1/files: input and output files of batches. Only the key that created a file can access it."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from octavo.api.errors import InvalidRequest
from octavo.server.http.auth import get_owner
from octavo.server.http.body import get_ignored
from octavo.server.http.forms import FILE_FIELD, get_fields, get_file, open_form
from octavo.server.ignored import IgnoredFields, join_path
from octavo.server.openai.listing import listing
from octavo.server.state.file_writer import FileWriter
from octavo.server.state.service import Service, get_service
from octavo.server.state.store import Page, Record, Store, get_file_path

PURPOSES = ("batch",)
MAX_NAME = 255
AGES_S = (3600, 30 * 86400)
"""OpenAI's range of an upload's expiry, in seconds."""
AGE_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")
BYTES = "application/octet-stream"
COPY_BYTES = 1 << 20
FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                    FILE_FIELD: {"type": "string", "format": "binary"},
                    **{name: {"type": "string"} for name in AGE_FIELDS},
                },
                "required": ["purpose", FILE_FIELD],
            }
        }
    },
}
"""OpenAPI description of the form that `open_form` reads."""

router = APIRouter()


async def get_store(service: Annotated[Service, Depends(get_service)]) -> Store:
    """Returns the server's store; raises a 404 without one."""
    if service.store is None:
        raise HTTPException(404, "this server stores no files (hint: start it with --state-dir)")
    return service.store


StoreHere = Annotated[Store, Depends(get_store)]


@router.post("/v1/files", openapi_extra={"requestBody": FORM})
async def upload(
    request: Request, service: Annotated[Service, Depends(get_service)], store: StoreHere
) -> dict[str, Any]:
    """Stores a file of JSON lines; it is on disk when the response is sent."""
    settings = service.settings
    store.check_room(int(request.headers.get("content-length", "0")))
    file_id = f"file-{secrets.token_hex(12)}"
    async with open_form(
        request, max_bytes=settings.max_file_bytes, timeout_s=settings.request_timeout_s
    ) as form:
        expires_at = _expires_at(get_fields(form), store)
        file, purpose = _parse_form(form, get_ignored(request))
        store.check_room(file.size or 0)
        with FileWriter(store.folder, file_id) as writer:
            while data := await file.read(COPY_BYTES):
                await writer.write(data)
            await writer.commit()
    record = file_record(
        file_id,
        get_owner(request),
        file.filename or "",
        purpose,
        writer.num_bytes,
        expires_at=expires_at,
    )
    await store.add(record)
    return public_file(record)


@router.get("/v1/files")
async def list_files(
    request: Request,
    store: StoreHere,
    *,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
) -> dict[str, Any]:
    page = Page(limit, after, newest_first=order == "desc", purpose=purpose)
    records, has_more = await store.page("file", get_owner(request), page)
    return listing([public_file(record) for record in records], has_more=has_more)


@router.get("/v1/files/{file_id}")
async def show_file(file_id: str, request: Request, store: StoreHere) -> dict[str, Any]:
    return public_file(await find_file(store, file_id, get_owner(request)))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {BYTES: {}}}},
)
async def content(file_id: str, request: Request, store: StoreHere) -> Response:
    record = await find_file(store, file_id, get_owner(request))
    path = get_file_path(store.folder, record.id)
    if not await asyncio.to_thread(path.is_file):
        raise HTTPException(404, f"the bytes of the file {file_id!r} no longer exist")
    return FileResponse(path, media_type=BYTES)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request, store: StoreHere) -> dict[str, Any]:
    """Deletes a file, unless an unfinished batch reads it."""
    record = await find_file(store, file_id, get_owner(request))
    for batch in await store.unfinished("batch"):
        if batch.body["batch"]["input_file_id"] == file_id:
            raise InvalidRequest(
                f"file {file_id!r} is in use by the batch {batch.id!r}",
                hint="wait until the batch has finished, or cancel it",
            )
    await store.delete(record)
    return {"id": file_id, "object": "file", "deleted": True}


def file_record(
    file_id: str, owner: str, name: str, purpose: str, num_bytes: int, *, expires_at: int
) -> Record:
    """Returns the record of a file on disk."""
    body = {"filename": name, "purpose": purpose}
    return Record(
        id=file_id,
        kind="file",
        owner=owner,
        body=body,
        created_at=int(time.time()),
        expires_at=expires_at,
        num_bytes=num_bytes,
    )


def public_file(record: Record) -> dict[str, Any]:
    """Returns the file object of the API."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.body["filename"],
        "purpose": record.body["purpose"],
        "status": "processed",
        "status_details": None,
    }


async def find_file(store: Store, file_id: str, owner: str) -> Record:
    """Returns an owner's file; raises a 404 if there is none."""
    record = await store.find("file", file_id, owner)
    if record is None:
        raise HTTPException(404, f"No such File object: {file_id}")
    return record


def _parse_form(form: FormData, ignored: IgnoredFields) -> tuple[UploadFile, str]:
    """Returns (file, purpose); raises InvalidRequest if the form is incomplete."""
    fields, file = get_fields(form), get_file(form)
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        raise InvalidRequest(f"purpose: got {purpose!r}, expected 'batch'", param="purpose")
    if file is None:
        raise InvalidRequest("file: field required", param="file")
    for name in fields:
        if name not in ("purpose", *AGE_FIELDS):
            ignored.add(join_path("", name), "no such field")
    name = file.filename or ""
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidRequest(
            f"file: got the name {name[:MAX_NAME]!r}, expected 1 to {MAX_NAME} printable"
            " characters",
            param="file",
        )
    return file, purpose


def _expires_at(fields: dict[str, str], store: Store) -> int:
    """Returns the file's expiry as Unix time: the server's limit, or earlier if requested."""
    anchor, seconds = (fields.get(name) for name in AGE_FIELDS)
    if anchor is None and seconds is None:
        return store.expires_at
    low, high = AGES_S
    if anchor != "created_at" or not (seconds or "").isdecimal() or len(seconds or "") > 9:
        raise InvalidRequest(
            "expires_after: expected the anchor 'created_at' and an integer number of seconds",
            param="expires_after",
        )
    if not low <= int(seconds or "") <= high:
        raise InvalidRequest(
            f"expires_after: got {seconds} seconds, expected {low} to {high}",
            param="expires_after",
        )
    return min(int(time.time()) + int(seconds or ""), store.expires_at)
