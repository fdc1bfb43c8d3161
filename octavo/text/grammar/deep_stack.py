"""Runs llguidance with enough stack: it recurses as deep as rules and schemas refer to one another,
and a stack overflow kills the process.

The recursion depth is bounded by the text's length. Computing masks does not recurse.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TypeVar

SHALLOW_BYTES = 2 << 10
"""Texts up to this length compile on any thread's stack."""
LARGE_BYTES = 64 << 10
"""Larger texts compile one at a time, because their stacks may take much memory."""
LEAST_STACK_BYTES = 8 << 20
STACK_BYTES_PER_BYTE = 1024
"""Stack per byte of text: chains of rules, terminals and references need 120 to 550."""

STARTS = threading.Lock()
"""Held while starting a thread with another stack size, which is a process-wide setting."""
LARGE = threading.Lock()
"""Held while a large text compiles."""

Returned = TypeVar("Returned")


def with_deep_stack(run: Callable[[], Returned], num_bytes: int) -> Returned:
    """Calls `run`, which compiles a text of `num_bytes` bytes; long texts run on a thread with a
    larger stack.
    """
    if num_bytes <= SHALLOW_BYTES:
        return run()
    with LARGE if num_bytes > LARGE_BYTES else nullcontext():
        return _start(run, LEAST_STACK_BYTES + num_bytes * STACK_BYTES_PER_BYTE).result()


def _start(run: Callable[[], Returned], stack_bytes: int) -> Future[Returned]:
    done: Future[Returned] = Future()

    def work() -> None:
        try:
            done.set_result(run())
        except BaseException as error:
            done.set_exception(error)

    with STARTS:
        before = threading.stack_size(stack_bytes)
        try:
            threading.Thread(target=work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done
