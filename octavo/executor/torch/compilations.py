"""Counts the Triton kernels that this process compiles. A kernel that is compiled during a step
delays it by about a second, so all are compiled before the first request (`warm_up.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from octavo.executor.torch.triton.device import is_interpreted

logger = logging.getLogger(__name__)


class Compilations:
    """Compiled kernels of this process."""

    def __init__(self) -> None:
        self._num_late = 0
        self._num_expecting = 0
        self._next: Callable[..., Any] | None = None
        self._is_installed = False

    @property
    def num_late(self) -> int:
        """Number of kernels compiled outside of `expected`: during steps."""
        return self._num_late

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Does not count kernels compiled in its block. The first call begins to count."""
        self._install()
        self._num_expecting += 1
        try:
            yield
        finally:
            self._num_expecting -= 1

    def add(self, **compiled: Any) -> Any:
        """Counts one kernel; `compiled` are the arguments of Triton's hook."""
        if not self._num_expecting:
            self._num_late += 1
            logger.warning(
                "compiled the kernel %s during a step, which delayed it", compiled["fn"].name
            )
        return None if self._next is None else self._next(**compiled)

    def _install(self) -> None:
        if self._is_installed or is_interpreted():
            return
        try:
            from triton import knobs
        except ImportError:
            return
        self._next = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self.add
        self._is_installed = True


COMPILATIONS = Compilations()
"""The counter of this process: Triton's hook has one place."""
