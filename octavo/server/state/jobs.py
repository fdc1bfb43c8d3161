"""Asynchronous jobs: at most `max_jobs`, kept for `job_ttl_s` seconds after they finish.

A new job replaces the oldest finished one; if all are running, it is rejected.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from octavo.api.errors import OctavoError, Overloaded
from octavo.api.outputs import RequestOutput
from octavo.server.output_streams import OutputStreams


@dataclass(slots=True)
class Job:
    request_id: str
    owner: str
    """Name of the key that created it."""
    wants_timings: bool = False
    task: asyncio.Task[None] | None = None
    latest: RequestOutput | None = None
    """Latest output; None before the first token."""
    error: OctavoError | None = None
    finished_at: float | None = None
    """Time on the monotonic clock, in seconds; None while it runs."""

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        if self.finished_at is not None:
            return "finished"
        return "waiting" if self.latest is None else "running"


class Jobs:
    """Jobs by owner and request id, oldest first."""

    def __init__(self, *, max_jobs: int, ttl_s: float) -> None:
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()
        self._max_jobs = max_jobs
        self._ttl_s = ttl_s

    def start(
        self, streams: OutputStreams, request_id: str, owner: str, *, wants_timings: bool
    ) -> Job:
        """Consumes a generation in a new task.

        Must be called right after `make_room`, without an `await` in between.
        """
        job = self._jobs[owner, request_id] = Job(request_id, owner, wants_timings)
        self._jobs.move_to_end((owner, request_id))  # a finished job may have had the same id
        job.task = asyncio.create_task(_follow(job, streams))
        return job

    def make_room(self) -> None:
        """Makes room for one more job; raises Overloaded if all are running."""
        self._sweep()
        if len(self._jobs) < self._max_jobs:
            return
        oldest = next((job for job in self._jobs.values() if job.finished_at is not None), None)
        if oldest is None:
            raise Overloaded(
                f"{len(self._jobs)} jobs are running, expected at most {self._max_jobs}",
                hint="try again later, or raise max_jobs",
            )
        del self._jobs[oldest.owner, oldest.request_id]

    def find(self, request_id: str, owner: str) -> Job:
        """Returns an owner's job; raises a 404 if it is unknown or has expired."""
        self._sweep()
        job = self._jobs.get((owner, request_id))
        if job is None:
            raise HTTPException(
                404,
                f"no job {request_id!r}: unknown, or finished more than {self._ttl_s:g}"
                " seconds ago",
            )
        return job

    def discard(self, request_id: str, owner: str) -> None:
        """Removes an owner's job; aborts it if it is running."""
        job = self.find(request_id, owner)
        if job.task is not None:
            job.task.cancel()
        del self._jobs[owner, request_id]

    def _sweep(self) -> None:
        oldest_kept = time.monotonic() - self._ttl_s
        expired = [
            key
            for key, job in self._jobs.items()
            if job.finished_at is not None and job.finished_at < oldest_kept
        ]
        for key in expired:
            del self._jobs[key]


async def _follow(job: Job, streams: OutputStreams) -> None:
    """Stores the latest output of a generation, or its error."""
    try:
        async for _, output in streams.outputs():
            job.latest = output
    except OctavoError as error:
        job.error = error
    finally:
        job.finished_at = time.monotonic()
