"""Custom logits processors: functions that change a row's logits before sampling, loaded by name at
startup and called with a timeout.

A call runs in a separate thread, for which the worker waits until the timeout at most; a failure
fails only the row. Independent of rows and backends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.processors import ProcessorEntry
from octavo.utils.import_function import import_function

Logits = NDArray[np.float32]
Processor = Callable[[NDArray[np.int32], Logits], Any]
"""Takes copies of a request's tokens so far, `[num_tokens]`, and of the next token's logits, `[V]`.
Returns logits `[V]`, or None if it has changed its copy in place.
"""


class ProcessorFault(Exception):
    """A processor raised an error, timed out, or returned no logits."""


def load_processors(entries: Sequence[ProcessorEntry]) -> dict[str, Processor]:
    """Imports the functions; raises ConfigError if one does not exist or cannot be called."""
    return {
        entry.name: import_function(
            "logits_processors", entry.module, entry.attribute, entry.numbers
        )
        for entry in entries
    }


@dataclass(slots=True)
class ProcessorCall:
    run: Callable[[], Logits]
    done: threading.Event = field(default_factory=threading.Event)
    result: Logits | None = None
    error: Exception | None = None


class CallThread:
    """A daemon thread that makes calls one after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[ProcessorCall | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="logits processors", daemon=True).start()

    def begin(self, run: Callable[[], Logits]) -> ProcessorCall:
        call = ProcessorCall(run)
        self._calls.put(call)
        return call

    def end(self) -> None:
        """Ends the thread after its pending calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.run()
            except Exception as error:
                call.error = error
            call.done.set()


class LogitsProcessors:
    def __init__(self, processors: Mapping[str, Processor], timeout_s: float) -> None:
        self._processors = processors
        self._timeout_s = timeout_s
        self._thread: CallThread | None = None
        self._overdue: dict[str, ProcessorCall] = {}
        """Calls that timed out and have not ended, by processor name."""

    def apply(self, names: Sequence[str], token_ids: NDArray[np.int32], logits: Logits) -> Logits:
        """Applies processors to a row's logits, one after another; raises ProcessorFault if one
        fails.
        """
        for name in names:
            logits = self._call(name, token_ids, logits)
        return logits

    def close(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def _call(self, name: str, token_ids: NDArray[np.int32], logits: Logits) -> Logits:
        overdue = self._overdue.get(name)
        if overdue is not None and not overdue.done.is_set():
            raise ProcessorFault(f"the logits processor {name!r} is still running an earlier call")
        self._overdue.pop(name, None)
        if self._thread is None:
            self._thread = CallThread()
        ids, own = token_ids.copy(), logits.copy()
        call = self._thread.begin(
            lambda: _check_result(name, self._processors[name](ids, own), own)
        )
        if not call.done.wait(self._timeout_s):
            self._overdue[name], self._thread = call, None
            raise ProcessorFault(
                f"the logits processor {name!r} took more than {self._timeout_s:g} s"
                " (logits_processor_timeout)"
            )
        if call.error is None:
            assert call.result is not None
            return call.result
        if isinstance(call.error, ProcessorFault):
            raise call.error
        raise ProcessorFault(
            f"the logits processor {name!r} raised {type(call.error).__name__}: {call.error}"
        ) from call.error


def _check_result(name: str, returned: Any, row_logits: Logits) -> Logits:
    """Returns a processor's result as fp32 logits; raises ProcessorFault if it is invalid."""
    result = row_logits if returned is None else np.asarray(returned)
    if result.shape != row_logits.shape or result.dtype.kind not in "fiu":
        raise ProcessorFault(
            f"the logits processor {name!r} returned {result.dtype} of the shape {result.shape},"
            f" expected numbers of the shape {row_logits.shape}"
        )
    logits = np.ascontiguousarray(result, np.float32)
    if np.isnan(logits).any():
        raise ProcessorFault(f"the logits processor {name!r} returned NaN logits")
    return logits
