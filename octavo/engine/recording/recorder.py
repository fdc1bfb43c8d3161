"""The log of an engine: every request with its seed, every plan and every result, so that the same
steps can be made again.

One JSON object a line, written before the step it plans is computed, so that the log of an engine
that died ends with the plan it died of. Decides nothing; what is done with a log is `replay.py`'s
business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from octavo.config.engine_config import CacheOptions, SchedulerOptions
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.kv.pin import Pin
from octavo.engine.kv.tier_connector import Tiers
from octavo.engine.requests.request import EngineRequest
from octavo.engine.step_costs import StepCosts
from octavo.errors import ConfigError
from octavo.step import RowResult, StepPlan, StepResult, TokenLogprobs

FORMAT = 2

NO_LOGPROBS = TokenLogprobs([], [], [])

logger = logging.getLogger(__name__)


class Began(msgspec.Struct, tag=True):
    """The first line: what the scheduler was made of, and all options by their flat names."""

    format: int
    version: str
    options: dict[str, Any]
    scheduler: SchedulerOptions
    cache: CacheOptions
    groups: list[BlockGroup]
    block_size: int
    max_model_len: int
    kv_bytes: int
    """Of all groups' blocks: who asks for so many gets these groups."""
    tiers: Tiers | None = None


class Added(msgspec.Struct, tag=True):
    request: EngineRequest


class Aborted(msgspec.Struct, tag=True):
    request_id: str


class GivenUp(msgspec.Struct, tag=True):
    """A request that no step has started."""

    request_id: str
    error: str


class CacheReset(msgspec.Struct, tag=True):
    reset_connector: bool = False


class Pinned(msgspec.Struct, tag=True):
    """Or not, if it was refused."""

    pin: Pin


class Planned(msgspec.Struct, tag=True):
    now: float
    costs: StepCosts
    plan: StepPlan
    waits_for: str
    """What keeps the first of the waiting from starting; "" where nobody waits."""


class Computed(msgspec.Struct, tag=True):
    result: StepResult
    failed: bool = False
    """As a whole: nobody knows how far the plan was carried out."""


Event = Began | Added | Aborted | GivenUp | CacheReset | Pinned | Planned | Computed


class Log(Protocol):
    """Is told of everything that decides what an engine does."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class NoLog:
    def write(self, event: Event) -> None:
        """Nobody asked for it."""

    def close(self) -> None:
        """Nothing is open."""


class Recorder:
    """A Log in a file, which is made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._plans: dict[int, StepPlan] = {}
        """Those that have no result yet, by their step."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"record: cannot write {path}: {error.strerror}") from error

    def write(self, event: Event) -> None:
        """Where the disk is full the log ends, and the engine goes on."""
        if self._file.closed:
            return
        if isinstance(event, Planned):
            self._plans[event.plan.step] = event.plan
        elif isinstance(event, Computed):
            plan = self._plans.pop(event.result.step)
            event = Computed(
                msgspec.structs.replace(event.result, rows=lean_rows(plan, event.result.rows)),
                event.failed,
            )
        try:
            self._file.write(self._encoder.encode(event) + b"\n")
            self._file.flush()
        except OSError as error:
            logger.error("%s: nothing is recorded any more: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            logger.error("%s: its last lines are lost", self._path)


def check_writable(path: Path) -> None:
    """ConfigError where a Recorder could not be made; what lies there stays as it is."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"record: cannot write {path}: {error.strerror}") from error


def lean_rows(plan: StepPlan, rows: Sequence[RowResult]) -> list[RowResult]:
    """What the scheduler looks at: tokens, failures, how many prompt logprobs came, and the
    logprobs that a beam search chooses by.
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
    )


def read_log(path: Path) -> tuple[Began, Iterator[Event]]:
    """What it begins with, and all that follows; ConfigError where the file is no log. A last line
    that was cut off is left out.
    """
    try:
        lines = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(Event)
    first = lines.readline()
    try:
        began = decoder.decode(first)
    except msgspec.MsgspecError:
        began = None
    if not isinstance(began, Began) or began.format != FORMAT:
        raise ConfigError(
            f"{path}: no recording, or one of another version",
            hint="`octavo serve --record FILE` makes one",
        )
    return began, _rest(path, lines, decoder)


def _rest(path: Path, lines: Any, decoder: msgspec.json.Decoder[Event]) -> Iterator[Event]:
    with lines:
        for number, line in enumerate(lines, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}: line {number} is damaged: {error}") from error
