"""Room for llguidance to compile in: it recurses as deep as rules and schemas refer to one another,
and a stack that overflows ends the process.

A text refers the deeper the longer it is, so its length bounds the stack that it may take. Masks
are made without recursion.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TypeVar

SHALLOW_BYTES = 2 << 10
"""Length of the texts that the stack of any thread has room for."""
LARGE_BYTES = 64 << 10
"""Length of the texts of which one at a time is compiled, since their stacks may take much memory.
"""
LEAST_STACK_BYTES = 8 << 20
STACK_BYTES_PER_BYTE = 1024
"""Stack for each byte of a text: chains of rules, terminals and references take 120 to 550."""

STARTS = threading.Lock()
"""Held while a thread of another stack size starts: the size is the process's."""
LARGE = threading.Lock()
"""Held while a large text is compiled."""

Returned = TypeVar("Returned")


def with_deep_stack(run: Callable[[], Returned], num_bytes: int) -> Returned:
    """Calls a function that compiles a text of `num_bytes` bytes, a long one in a thread of its own
    whose stack goes back to the system; returns what it returns.
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
