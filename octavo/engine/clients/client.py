"""How a front reaches a core: in its own process by direct calls, or in a process of the core's own
(see `process_client.py`).

A client hands over requests and gives back outputs; it knows no text. `receive` is called by one
thread; the others by any.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Protocol

import msgspec

from octavo.engine.core import CoreOutputs, EngineCore, TakeEarly
from octavo.engine.kv.pin import Pin
from octavo.engine.requests.request import EngineRequest


class EngineInfo(msgspec.Struct):
    """What a front must know of a core that has started."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    description: str
    """What fits, for people: the line printed at the start."""


class EngineClient(Protocol):
    info: EngineInfo
    trouble: str
    """Why nothing is computed just now, though the core has not ended for good; "" where all is
    well.
    """

    def add(self, requests: list[EngineRequest]) -> None: ...

    def abort(self, request_ids: list[str]) -> None:
        """Each that is still known ends in an output with finish_reason "abort"."""
        ...

    def receive(
        self, timeout_s: float | None = None, *, take_early: TakeEarly | None = None
    ) -> CoreOutputs | None:
        """What the next step gave; blocks, without using the CPU, while there is nothing to do.
        None: the time is up, or closed.

        `take_early`: takes what a core in this process yields before a step's end, in this thread.
        Without, a step ends with the first token of each request. What a core in a process of its
        own yields is received as it comes.
        """
        ...

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """False while requests hold blocks. With `reset_connector` off the device too."""
        ...

    def pin_prefix(self, pin: Pin) -> int:
        """How many tokens of the prompt are kept; InvalidRequest where that cannot be."""
        ...

    def close(self) -> None: ...


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    reset_connector: bool = False


Question = ResetPrefixCache | Pin


class Ask(msgspec.Struct, tag=True):
    """What has an answer of its own, which bears the same number."""

    number: int
    question: Question


class Close(msgspec.Struct, tag=True):
    pass


Command = Add | Abort | Ask | Close


class InProcessClient:
    """A core in this process: `receive` is a step. One that hangs cannot be replaced, nor does
    anybody watch it.
    """

    trouble = ""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self.info = info
        self._core = core
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while the core works, since a reset may come from another thread."""
        self._closed = False

    def add(self, requests: list[EngineRequest]) -> None:
        self._inbox.put(Add(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._inbox.put(Abort(request_ids))

    def receive(
        self, timeout_s: float | None = None, *, take_early: TakeEarly | None = None
    ) -> CoreOutputs | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._take_commands(wait=not self._core.has_work, timeout_s=timeout_s)
        while not self._closed and self._core.has_work and (pause_s := self._core.pause_s()):
            left_s = pause_s if end is None else end - time.monotonic()
            if left_s <= 0:
                return None
            self._take_commands(wait=True, timeout_s=min(pause_s, left_s))
        with self._lock:
            if self._closed or not self._core.has_work:
                return None
            return self._core.step(
                lambda outputs: (
                    take_early is not None and self._inbox.empty() and take_early(outputs)
                )
            )

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        return bool(self._ask(ResetPrefixCache(reset_connector)))

    def pin_prefix(self, pin: Pin) -> int:
        return self._ask(pin)

    def close(self) -> None:
        """Ends a `receive` that waits, then the core."""
        self._inbox.put(Close())
        with self._lock:
            if not self._closed:
                self._closed = True
                self._core.close()

    def _ask(self, question: Question) -> int:
        self._take_commands(wait=False, timeout_s=None)
        with self._lock:
            return answer(self._core, question)

    def _take_commands(self, *, wait: bool, timeout_s: float | None) -> None:
        """All that have come; with `wait` at least one, unless the time is up."""
        try:
            while True:
                command = self._inbox.get(block=wait, timeout=timeout_s if wait else None)
                with self._lock:
                    apply_command(self._core, command)
                wait = False
        except queue.Empty:
            return


def answer(core: EngineCore, question: Question) -> int:
    if isinstance(question, Pin):
        return core.pin_prefix(question)
    return int(core.reset_prefix_cache(reset_connector=question.reset_connector))


def apply_command(core: EngineCore, command: Command) -> None:
    if isinstance(command, Add):
        for request in command.requests:
            core.add(request)
    elif isinstance(command, Abort):
        for request_id in command.request_ids:
            core.abort(request_id)
