"""Runs batches with the lowest priority and stores each request's result once.

State and results are on disk, so that a batch resumes after a restart without repeating finished
requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.api.errors import OctavoError, Overloaded
from octavo.server.batch_gate import BatchGate, PutBack
from octavo.server.batch_input import (
    BatchLine,
    CheckedInput,
    InputLimits,
    LineError,
    check_input,
    read_lines,
)
from octavo.server.internal_requests import InternalRequests, InternalResponse
from octavo.server.state.file_writer import FileWriter
from octavo.server.state.service import Service
from octavo.server.state.store import LineResult, Record, Store, get_file_path

logger = logging.getLogger(__name__)

MAX_AHEAD = 256
"""Maximum number of requests of one batch that wait for admission."""
TRIES = 3
"""Attempts for a request that fails with a server error."""
RETRY_S = 1.0
"""Delay before a retry after an unavailable engine or a full queue, in seconds."""
LONGEST_RETRY_S = 60.0
"""Maximum delay before a retry after a key's token limit, in seconds."""
PAUSES_S = (1.0, 300.0)
"""Minimum and maximum delay before a batch continues after its store failed, in seconds."""
RESULTS_AT_ONCE = 64
NOT_YET = (429, 499, 503)
"""HTTP statuses that do not depend on the request itself: the request is retried."""


@dataclass(slots=True)
class BatchRun:
    """An unfinished batch."""

    record: Record
    counts: dict[str, int] = field(
        default_factory=lambda: {"total": 0, "completed": 0, "failed": 0}
    )
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def batch(self) -> dict[str, Any]:
        """The batch object of the API."""
        batch: dict[str, Any] = self.record.body["batch"]
        return {**batch, "request_counts": dict(self.counts)}

    def count(self, *, failed: bool) -> None:
        self.counts["failed" if failed else "completed"] += 1


class BatchRunner:
    """Unfinished batches, by id."""

    def __init__(self, service: Service, store: Store, inner: InternalRequests) -> None:
        self._service = service
        self._store = store
        self._inner = inner
        self._gate = BatchGate(service)
        self._runs: dict[str, BatchRun] = {}

    async def resume(self) -> None:
        """Resumes the batches that an earlier server did not finish."""
        for record in await self._store.unfinished("batch"):
            if record.id not in self._runs:
                self._begin(record)

    async def stop(self) -> None:
        """Cancels the tasks; unfinished batches can be resumed."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, record: Record) -> BatchRun:
        """Stores and starts a new batch; raises Overloaded if too many are unfinished."""
        max_jobs = self._service.settings.max_jobs
        if len(self._runs) >= max_jobs:
            raise Overloaded(
                f"{len(self._runs)} batches are unfinished, expected at most {max_jobs}",
                hint="try again later, or raise max_jobs",
            )
        await self._store.add(record)
        return self._begin(record)

    def find(self, batch_id: str) -> BatchRun | None:
        """Returns an unfinished batch, or None; the caller has checked its owner."""
        return self._runs.get(batch_id)

    async def cancel(self, run: BatchRun) -> None:
        """Cancels a batch; returns when the cancellation is stored."""
        if not run.is_cancelled.is_set() and run.record.body["batch"]["failed_at"] is None:
            await self._change(run, status="cancelling", cancelling_at=int(time.time()))
            run.is_cancelled.set()

    def _begin(self, record: Record) -> BatchRun:
        run = self._runs[record.id] = BatchRun(record)
        if record.body["batch"]["status"] == "cancelling":
            run.is_cancelled.set()
        run.task = asyncio.create_task(self._run_to_end(run))
        return run

    async def _change(self, run: BatchRun, **changes: Any) -> None:
        """Stores a batch's new state."""
        body = {"batch": {**run.batch, **changes}}
        run.record = replace(run.record, body=body)
        await self._store.replace(run.record)

    # -- a batch's task ----------------------------------------------------------------------------

    async def _run_to_end(self, run: BatchRun) -> None:
        """Runs a batch to its end, retrying after failures of the store."""
        pause_s, longest_s = PAUSES_S
        while True:
            try:
                await self._finish(run)
                break
            except Exception:
                logger.exception("batch %s resumes in %g s", run.record.id, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        del self._runs[run.record.id]

    async def _finish(self, run: BatchRun) -> None:
        path = get_file_path(self._store.folder, run.record.body["batch"]["input_file_id"])
        batch = run.record.body["batch"]
        checked = await asyncio.to_thread(check_input, path, self._limits(batch["endpoint"]))
        if checked.errors and not run.is_cancelled.is_set():
            await self._fail(run, checked.errors)
            return
        run.counts["total"] = checked.num_lines
        done = await self._recount(run)
        if batch["status"] == "validating":
            await self._change(
                run, status="in_progress", in_progress_at=int(time.time()), model=checked.model
            )
        ending = await self._run_lines(run, checked, done)
        if ending == "expired":
            await self._expire_lines(run)
        await self._end(run, ending)

    async def _recount(self, run: BatchRun) -> set[int]:
        """Counts stored results; returns their line numbers."""
        done = await self._store.lines_done(run.record.id)
        failed = sum(done.values())
        run.counts.update(completed=len(done) - failed, failed=failed)
        return set(done)

    async def _run_lines(self, run: BatchRun, checked: CheckedInput, done: set[int]) -> str:
        """Runs requests without a result; returns the batch's final status."""
        batch = run.record.body["batch"]
        if batch["expired_at"] is not None:
            return "expired"
        work = asyncio.create_task(self._run_all(run, checked.model, done))
        stop = asyncio.create_task(run.is_cancelled.wait())
        left_s = max(0.0, batch["expires_at"] - time.time())
        try:
            await asyncio.wait({work, stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return "cancelled" if batch["status"] == "cancelling" else "completed"
            return "cancelled" if stop.done() else "expired"
        finally:
            work.cancel()
            stop.cancel()
            await asyncio.wait({work, stop})

    async def _run_all(self, run: BatchRun, model: str | None, done: set[int]) -> None:
        ahead = asyncio.Semaphore(MAX_AHEAD)
        batch = run.record.body["batch"]
        path = get_file_path(self._store.folder, batch["input_file_id"])
        async with asyncio.TaskGroup() as tasks:
            async for line in read_lines(path, self._service.settings.max_body_bytes):
                if line.number not in done:
                    await ahead.acquire()
                    task = tasks.create_task(self._run_one(run, line, model))
                    task.add_done_callback(lambda _: ahead.release())

    async def _run_one(self, run: BatchRun, line: BatchLine, model: str | None) -> None:
        """Runs a request until it has a result, and stores it."""
        endpoint = run.record.body["batch"]["endpoint"]
        answer = None
        tries = 0
        while answer is None:
            asked = self._post(endpoint, line.body, run.record.owner)
            try:
                answer = await self._gate.run(asked, model)
            except PutBack:
                continue
            tries += answer.status >= 500 and answer.status not in NOT_YET
            if not self._is_outcome(answer, model, tries):
                pause_s = min(max(RETRY_S, answer.retry_after_s), LONGEST_RETRY_S)
                answer = None
                await asyncio.sleep(pause_s)
        result = LineResult(line.number, answer.status != 200, _format_result(line, answer))
        await self._store.add_line(run.record.id, result)
        run.count(failed=result.failed)

    async def _post(self, endpoint: str, body: bytes, owner: str) -> InternalResponse:
        """Returns a route's response; unexpected exceptions become a 500."""
        try:
            return await self._inner.post(endpoint, body, owner)
        except Exception:
            logger.exception("a batch request failed")
            return InternalResponse(500, b'{"error": {"message": "Internal server error"}}')

    def _is_outcome(self, answer: InternalResponse, model: str | None, tries: int) -> bool:
        """Returns whether a response is final. It is not if an unavailable engine caused it."""
        if answer.status < 500:
            return answer.status not in NOT_YET
        try:
            self._service.loaded_model(model).llm.check_health()
        except OctavoError:
            return False
        return answer.status not in NOT_YET and tries >= TRIES

    # -- end of a batch ----------------------------------------------------------------------------

    async def _fail(self, run: BatchRun, errors: list[LineError]) -> None:
        """Fails a batch with an invalid input file."""
        listed = {"object": "list", "data": [error.public() for error in errors]}
        run.record = replace(run.record, expires_at=self._store.expires_at)
        await self._change(run, status="failed", failed_at=int(time.time()), errors=listed)

    async def _expire_lines(self, run: BatchRun) -> None:
        """Stores an expiry result for each request without a result."""
        await self._change(run, expired_at=int(time.time()))
        done = await self._store.lines_done(run.record.id)
        path = get_file_path(self._store.folder, run.record.body["batch"]["input_file_id"])
        async for line in read_lines(path, self._service.settings.max_body_bytes):
            if line.number not in done:
                result = LineResult(line.number, True, _format_expired(line))
                await self._store.add_line(run.record.id, result)
                run.count(failed=True)

    async def _end(self, run: BatchRun, status: str) -> None:
        """Writes the output files and ends the batch, in one transaction."""
        await self._recount(run)
        if status == "completed":
            await self._change(run, status="finalizing", finalizing_at=int(time.time()))
        output = await self._write(run, "output", lambda result: not result.failed)
        errors = await self._write(run, "error", lambda result: result.failed)
        files = [record for record in (output, errors) if record is not None]
        batch = {
            **run.batch,
            "status": status,
            f"{status}_at": int(time.time()),
            "output_file_id": output.id if output else None,
            "error_file_id": errors.id if errors else None,
        }
        ended = replace(run.record, body={"batch": batch}, expires_at=self._store.expires_at)
        await self._store.apply(add=files, replace=[ended], drop_lines_of=ended.id)
        run.record = ended

    async def _write(
        self, run: BatchRun, kind: str, is_included: Callable[[LineResult], bool]
    ) -> Record | None:
        """Writes a file of results in line order; returns None if there are none."""
        file_id = f"file-{secrets.token_hex(12)}"
        with FileWriter(self._store.folder, file_id) as writer:
            last = 0
            while results := await self._store.line_results(
                run.record.id, after=last, limit=RESULTS_AT_ONCE
            ):
                last = results[-1].line
                lines = [result.body for result in results if is_included(result)]
                if lines:
                    await writer.write(b"".join(lines))
            if not writer.num_bytes:
                return None
            await writer.commit()
        return Record(
            file_id,
            "file",
            run.record.owner,
            {"filename": f"{run.record.id}_{kind}.jsonl", "purpose": "batch_output"},
            expires_at=self._store.expires_at,
            num_bytes=writer.num_bytes,
        )

    def _limits(self, endpoint: str) -> InputLimits:
        settings = self._service.settings
        return InputLimits(endpoint, settings.max_batch_lines, settings.max_body_bytes)


def _format_result(line: BatchLine, answer: InternalResponse) -> bytes:
    """Formats a response as a line of an output or error file."""
    response = {
        "status_code": answer.status,
        "request_id": f"req_{secrets.token_hex(12)}",
        "body": msgspec.Raw(answer.body),
    }
    return _line(line, response, None)


def _format_expired(line: BatchLine) -> bytes:
    message = "This request could not be executed before the completion window expired."
    return _line(line, None, {"code": "batch_expired", "message": message})


def _line(line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    fields = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(fields) + b"\n"
