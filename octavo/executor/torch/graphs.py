"""CUDA graphs of decode steps for several batch sizes.

A graph contains the addresses of weights, KV cache and staging views; staging views have the same
address for equal shapes. A decode step is padded to the next captured size with rows of slot -1,
whose results are discarded. A `Record` function captures a graph; tests use one that reruns the
ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Captured batch sizes. From 16 on, padding adds at most half of a step's rows."""

GRAPH_BYTES = 8 << 20
"""Bytes per graph in addition to shared memory, for launches and their arguments."""


class Graph(Protocol):
    def replay(self) -> Tensor:
        """Returns the logits `[size, V]`, valid until the next replay."""
        ...


Record = Callable[[Callable[[], Tensor]], Graph]
"""Runs a function that computes logits and returns a graph that recomputes them from the same
inputs."""


def sizes_up_to(max_requests: int) -> tuple[int, ...]:
    """Returns the captured sizes for up to `max_requests` requests. `max_requests` itself is
    included if it does not exceed the largest size.
    """
    return (
        (*(size for size in SIZES if size < max_requests), max_requests)
        if 0 < max_requests <= SIZES[-1]
        else SIZES[: len(SIZES) if max_requests else 0]
    )


class CudaGraphs:
    """Records CUDA graphs in a shared memory pool; the largest is captured first so that others
    fit.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Graph:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        return CudaGraph(graph, logits)


@dataclass(frozen=True, slots=True, eq=False)
class CudaGraph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.logits


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraphs:
    """Graphs by size, for block tables of `width` blocks."""

    graphs: Mapping[int, Graph]
    width: int

    def padded(self, batch: StepBatch) -> StepBatch | None:
        """Pads a step to the next captured size.

        Returns None if no size fits or the step is not a decode step.
        """
        num = len(batch.token_ids)
        size = next((size for size in sorted(self.graphs) if size >= num), None)
        if size is None or not _is_decode(batch) or batch.block_tables.shape[2] > self.width:
            return None
        return StepBatch(
            token_ids=_fill(batch.token_ids, (size,), 0),
            key_indices=_fill(batch.key_indices, (size,), 0),
            positions=_fill(batch.positions, (len(batch.positions), size), 0),
            query_starts=np.arange(size + 1, dtype=np.int32),
            context_lens=_fill(batch.context_lens, (len(batch.slots), size), 1),
            slots=_fill(batch.slots, (len(batch.slots), size), -1),
            block_tables=_fill(batch.block_tables, (len(batch.slots), size, self.width), -1),
            sample_rows=np.arange(size, dtype=np.int32),
        )


def longest_decode(size: int, width: int, num_groups: int, num_axes: int = 1) -> StepBatch:
    """Returns the step to capture: rows that write no KV, with full tables of `width` blocks,
    windows that start at the first key, and positions on `num_axes` axes.
    """
    context = width * BLOCK_SIZE
    return StepBatch(
        token_ids=np.zeros(size, np.int32),
        key_indices=np.zeros(size, np.int32),
        positions=np.zeros((num_axes, size), np.int32),
        query_starts=np.arange(size + 1, dtype=np.int32),
        context_lens=np.full((num_groups, size), context, np.int32),
        slots=np.full((num_groups, size), -1, np.int32),
        block_tables=np.zeros((num_groups, size, width), np.int32),
        sample_rows=np.arange(size, dtype=np.int32),
    )


def _is_decode(batch: StepBatch) -> bool:
    """Returns whether every request has one row, sampled once, in order."""
    num = len(batch.token_ids)
    if (
        not num
        or batch.hidden is not None
        or batch.input_rows is not None
        or batch.limits is not None
        or batch.copies is not None
        or len(batch.query_starts) != num + 1
        or len(batch.sample_rows) != num
    ):
        return False
    return batch.query_starts[-1] == num and bool((batch.sample_rows == np.arange(num)).all())


def _fill(array: NDArray[np.int32], shape: tuple[int, ...], value: int) -> NDArray[np.int32]:
    filled = np.full(shape, value, np.int32)
    filled[tuple(slice(0, length) for length in array.shape)] = array
    return filled
