"""A check that kernels touch only the tensors of their launch. On a GPU a mask that lets a lane
past the end reads or overwrites what lies there unnoticed; Triton's interpreter reads and writes
plain addresses, so every lane can be checked there.
"""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter


class LaunchMemory:
    """The addresses of the running launch's tensors, with overlapping ones joined."""

    def __init__(self) -> None:
        self._begins = self._ends = np.zeros(0, np.uint64)

    def enter(self, arguments) -> None:
        spans: list[list[int]] = []
        for begin, end in sorted(map(_span, _tensors(arguments))):
            if spans and begin < spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([begin, end])
        self._begins, self._ends = np.array(spans, np.uint64).reshape(-1, 2).T

    def check(self, pointers, mask, what: str) -> None:
        """Raises AssertionError where a lane of a load or store that the mask lets through lies
        outside of the tensors.
        """
        at = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        if not at.size:
            return
        num_bytes = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8 or 1)
        span = np.searchsorted(self._begins, at, side="right").astype(np.int64) - 1
        outside = (span < 0) | (at + num_bytes > self._ends[np.maximum(span, 0)])
        assert not outside.any(), (
            f"{outside.sum()} of {at.size} lanes {what} outside of the launch's tensors"
        )


def _tensors(arguments):
    """Yields the tensors among arguments and in their bundles."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensors(argument)
        elif hasattr(argument, "data_ptr"):
            yield argument


def _span(tensor) -> tuple[int, int]:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (
        tensor.data_ptr(),
        tensor.data_ptr() + (last + 1 if tensor.numel() else 0) * tensor.element_size(),
    )


def check_launches(monkeypatch) -> None:
    """Checks every load and store of kernels from now on."""
    memory, builder, launch = (
        LaunchMemory(),
        interpreter.InterpreterBuilder,
        interpreter.GridExecutor,
    )
    to_host, load, store = (
        launch._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def checked_to_host(self, arguments, named):
        found, found_named = to_host(self, arguments, named)
        memory.enter([*found, *found_named.values()])
        return found, found_named

    def checked_load(self, pointers, mask, *rest):
        memory.check(pointers, mask, "read")
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        memory.check(pointers, mask, "write")
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(launch, "_init_args_hst", checked_to_host)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
