"""Records an engine: every request with its seed, every plan and every result, so that the steps
can be replayed.

The file has one JSON object per line. A plan is written before its step is computed, so the
recording of a crashed engine ends with the plan that crashed it. `replay.py` replays recordings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.api.errors import ConfigError
from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv.kv_connector import Tiers
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.requests import EngineRequest, Pin, PrefixRef, RequestChange
from octavo.engine.protocol.step import RowResult, StepPlan, StepResult, TokenLogprobs
from octavo.engine.protocol.step_costs import StepCosts

FORMAT = 8
"""Version of the recording format; recordings of other versions are rejected."""

NO_LOGPROBS = TokenLogprobs([], [], [])
"""Placeholder for prompt logprobs, of which only the number is recorded."""

logger = logging.getLogger(__name__)


class RecordingHeader(msgspec.Struct, tag=True):
    """First line: the arguments of the scheduler, and all options by name."""

    format: int
    version: str
    options: dict[str, Any]
    scheduler: SchedulerOptions
    cache: CacheOptions
    groups: list[BlockGroup]
    block_size: int
    max_model_len: int
    kv_bytes: int
    """Size of the KV cache in bytes, from which the number of blocks is derived."""
    tiers: Tiers | None = None
    can_resample: bool = msgspec.field(default=True, name="redraws")
    """Whether the backend could resample rows."""
    original: OriginalContext = ONE_CONTEXT
    """Original context of a LongRoPE model."""


class RequestAdded(msgspec.Struct, tag=True):
    """A request was added."""

    request: EngineRequest


class RequestAborted(msgspec.Struct, tag=True):
    """A request was aborted."""

    request_id: str


class RequestChanged(msgspec.Struct, tag=True):
    """A request was changed while it waited or ran, or after its end."""

    change: RequestChange


class RequestFailed(msgspec.Struct, tag=True):
    """A request failed because no step could start it."""

    request_id: str
    error: str


class PrefixCacheReset(msgspec.Struct, tag=True):
    """The prefix cache was reset."""

    reset_connector: bool = False


class PrefixPinned(msgspec.Struct, tag=True):
    """A prefix was to be pinned; the core may have rejected it."""

    pin: Pin


class PrefixFetched(msgspec.Struct, tag=True):
    """A prefix was to be fetched from the store."""

    prefix: PrefixRef


class StepPlanned(msgspec.Struct, tag=True):
    """A plan, and the arguments of `Scheduler.schedule`."""

    now: float
    costs: StepCosts
    plan: StepPlan
    waits_for: str
    """Reason why the first waiting request does not start; "" if none waits."""


class StepComputed(msgspec.Struct, tag=True):
    """Result of the oldest plan without one, or of the next decode step of the last plan."""

    result: StepResult
    failed: bool = False
    """Whether the complete step failed, possibly after partial execution."""


Event = (
    RecordingHeader
    | RequestAdded
    | RequestAborted
    | RequestChanged
    | RequestFailed
    | PrefixCacheReset
    | PrefixPinned
    | PrefixFetched
    | StepPlanned
    | StepComputed
)


class Recorder:
    """Writes events to a file; overwrites an existing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._plans: dict[int, StepPlan] = {}
        """Plans without a result, by step number."""
        self._computed: StepPlan | None = None
        """Plan of the last result."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"record: cannot write {path}: {error.strerror}") from error

    def write(self, event: Event) -> None:
        """Writes one event. If the disk is full, recording stops but the engine continues."""
        if self._file.closed:
            return
        if isinstance(event, StepPlanned):
            self._plans[event.plan.step] = event.plan
        elif isinstance(event, StepComputed):
            # The results of a plan's further decode steps follow the first one's.
            plan = self._plans.pop(event.result.step, None) or self._computed
            assert plan is not None, "a result follows its plan"
            self._computed = plan
            event = StepComputed(
                msgspec.structs.replace(event.result, rows=lean_rows(plan, event.result.rows)),
                event.failed,
            )
        try:
            self._file.write(self._encoder.encode(event) + b"\n")
            self._file.flush()
        except OSError as error:
            logger.error("%s: recording stopped: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            logger.error("%s: the last lines of the recording are lost", self._path)


def check_writable(path: Path) -> None:
    """Raises ConfigError if a Recorder cannot be created; leaves an existing file unchanged."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"record: cannot write {path}: {error.strerror}") from error


def lean_rows(plan: StepPlan, rows: Sequence[RowResult]) -> list[RowResult]:
    """Returns the parts of results that the scheduler reads: tokens, failures, the number of prompt
    logprobs, the logprobs of beam searches, and mirostat's mu.
    """
    return [
        _lean_row(row, searched=bool(scheduled.search_of))
        for scheduled, row in zip(plan.rows, rows, strict=True)
    ]


def _lean_row(row: RowResult, *, searched: bool) -> RowResult:
    count = len(row.prompt_logprobs or ())
    logprobs = row.logprobs if searched else None
    return RowResult(
        row.request_id,
        row.token_ids,
        logprobs,
        [NO_LOGPROBS] * count if count else None,
        failure=row.failure,
        num_kept=row.num_kept,
        mirostat_mu=row.mirostat_mu,
        draft_ids=row.draft_ids,
        draft_parents=row.draft_parents,
        kept_path=row.kept_path,
    )


def read_log(path: Path) -> tuple[RecordingHeader, Iterator[Event]]:
    """Returns the header and the events; raises ConfigError if the file is not a recording. A
    truncated last line is ignored.
    """
    try:
        lines = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(Event)
    first = lines.readline()
    try:
        header = decoder.decode(first)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, RecordingHeader) or header.format != FORMAT:
        raise ConfigError(
            f"{path}: not a recording, or written by another version",
            hint="create one with `octavo serve --record FILE`",
        )
    return header, _rest(path, lines, decoder)


def _rest(path: Path, lines: Any, decoder: msgspec.json.Decoder[Event]) -> Iterator[Event]:
    with lines:
        for number, line in enumerate(lines, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{path}: line {number} is damaged: {error}",
                    hint="record again; a recording that was cut off has an incomplete last line",
                ) from error
