"""/v1/batches: files of requests with the lowest priority. Only the key that created a batch can
access it.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from octavo.api.errors import InvalidRequest
from octavo.server.background_jobs import BackgroundJobs, get_background_jobs
from octavo.server.http.auth import get_owner
from octavo.server.http.body import Body, parse_body
from octavo.server.openai.files import StoreHere
from octavo.server.openai.listing import listing
from octavo.server.openai.responses.body import Metadata
from octavo.server.state.store import Page, Record, Store

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 14 * 86400

router = APIRouter()
JobsHere = Annotated[BackgroundJobs, Depends(get_background_jobs)]


class BatchBody(Body):
    unsupported = frozenset({"output_expires_after"})

    input_file_id: Annotated[str, Field(max_length=200, description="the id of a file")]
    endpoint: Annotated[
        Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"],
        Field(description="one of " + ", ".join(ENDPOINTS)),
    ]
    completion_window: Annotated[
        str,
        Field(
            pattern=r"^[1-9][0-9]{0,6}[smhd]$",
            description='"24h", or another integer with the unit s, m, h or d, at most 14 days',
        ),
    ]
    metadata: Metadata = None


@router.post("/v1/batches")
async def create_batch(
    request: Request,
    store: StoreHere,
    jobs: JobsHere,
    body: Annotated[BatchBody, Depends(parse_body(BatchBody))],
) -> dict[str, Any]:
    """Creates a batch; its input is validated and run in the background."""
    window_s = _seconds(body.completion_window)
    owner = get_owner(request)
    file = await store.find("file", body.input_file_id, owner)
    if file is None or file.body["purpose"] != "batch":
        raise InvalidRequest(
            f"input_file_id: no file {body.input_file_id!r} with purpose 'batch'",
            param="input_file_id",
        )
    store.check_room(file.num_bytes)
    now = int(time.time())
    batch = _new_batch(body, now, now + window_s)
    run = await jobs.batches.start(Record(batch["id"], "batch", owner, {"batch": batch}, now))
    return run.batch


@router.get("/v1/batches")
async def list_batches(
    request: Request,
    store: StoreHere,
    jobs: JobsHere,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    records, has_more = await store.page("batch", get_owner(request), Page(limit, after))
    return listing([_public(record, jobs) for record in records], has_more=has_more)


@router.get("/v1/batches/{batch_id}")
async def show_batch(
    batch_id: str, request: Request, store: StoreHere, jobs: JobsHere
) -> dict[str, Any]:
    return _public(await _find(store, batch_id, get_owner(request)), jobs)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(
    batch_id: str, request: Request, store: StoreHere, jobs: JobsHere
) -> dict[str, Any]:
    """Cancels a batch, keeping finished requests; responds 409 if the batch has ended."""
    record = await _find(store, batch_id, get_owner(request))
    run = jobs.batches.find(batch_id)
    if run is None:
        status = record.body["batch"]["status"]
        raise HTTPException(409, f"Cannot cancel a batch with status '{status}'.")
    await jobs.batches.cancel(run)
    return run.batch


def _public(record: Record, jobs: BackgroundJobs) -> dict[str, Any]:
    """Returns the batch object with current counts."""
    run = jobs.batches.find(record.id)
    batch: dict[str, Any] = record.body["batch"]
    return batch if run is None else run.batch


async def _find(store: Store, batch_id: str, owner: str) -> Record:
    record = await store.find("batch", batch_id, owner)
    if record is None:
        raise HTTPException(404, f"No batch found with id '{batch_id}'.")
    return record


def _seconds(window: str) -> int:
    """Parses a completion window."""
    match = re.fullmatch(r"(\d+)([smhd])", window)
    seconds = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequest(
            f"completion_window: got {window!r}, expected at most 14 days",
            param="completion_window",
        )
    return seconds


def _new_batch(body: BatchBody, now: int, expires_at: int) -> dict[str, Any]:
    return {
        "id": f"batch_{secrets.token_hex(12)}",
        "object": "batch",
        "endpoint": body.endpoint,
        "model": None,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "in_progress_at": None,
        "expires_at": expires_at,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata or {},
    }
