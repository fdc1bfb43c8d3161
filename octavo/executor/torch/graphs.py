"""CUDA graphs of decode steps, and of steps that verify drafts, for several numbers of requests.

A graph contains the addresses of weights, KV cache and staging views; staging views have the same
address for equal shapes. A step is padded to the next captured shape, in which all requests have
equally many rows, with rows of slot -1, whose results are discarded:

    a step of 2 requests, one with 3 drafted tokens     a | b b b b
    the graph of 2 requests of 5 rows                   a . . . . | b b b b .

A `Record` function captures a graph; tests use one that reruns the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

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
        """Returns the logits of all rows, `[rows, V]`, valid until the next replay."""
        ...


Record = Callable[[Callable[[], Tensor]], Graph]
"""Runs a function that computes logits and returns a graph that recomputes them from the same
inputs."""


class GraphShape(NamedTuple):
    """Shape of a captured step."""

    requests: int
    rows: int
    """Rows of each request."""
    adapters: bool = False
    """Whether rows may have LoRA adapters."""

    @property
    def num_rows(self) -> int:
        return self.requests * self.rows


def shapes_up_to(max_requests: int, max_drafted: int = 0) -> tuple[GraphShape, ...]:
    """Returns the captured shapes for up to `max_requests` requests: decode steps, and steps with
    up to `max_drafted` drafted tokens for each request.
    """
    shapes = [GraphShape(size, 1) for size in sizes_up_to(max_requests)]
    if max_drafted:
        rows = 1 + max_drafted
        fitting = min(max_requests, SIZES[-1] // rows)
        shapes += [GraphShape(size, rows) for size in sizes_up_to(fitting)]
    return tuple(shapes)


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
class PaddedStep:
    """A step in the shape of a graph."""

    batch: StepBatch
    shape: GraphShape
    rows: NDArray[np.int64]
    """Row in `batch` of each sampled row of the step, `[S]`."""

    @property
    def in_order(self) -> bool:
        """Whether sampled row s is row s."""
        return bool((self.rows == np.arange(len(self.rows))).all())


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraphs:
    """Graphs by shape, for block tables of `width` blocks."""

    graphs: Mapping[GraphShape, Graph]
    width: int

    def padded(self, batch: StepBatch) -> PaddedStep | None:
        """Pads a step to the next captured shape.

        Returns None if no shape fits, if padding would more than double the rows of a step with
        drafts, or if the step has inputs that no graph reads.
        """
        counts = np.diff(batch.query_starts)
        num, most = len(counts), int(counts.max(initial=0))
        adapters = batch.adapter_rows
        fitting = (
            shape
            for shape in self.graphs
            if shape.requests >= num
            and shape.rows >= most
            and shape.adapters == (adapters is not None)
        )
        shape = min(fitting, key=lambda fits: fits.num_rows, default=None)
        if shape is None or not _is_generation(batch) or batch.block_tables.shape[2] > self.width:
            return None
        if shape.rows > 1 and 2 * len(batch.token_ids) < num * shape.rows:
            return None
        request = np.repeat(np.arange(num), counts)
        at = request * shape.rows + np.arange(len(request)) - batch.query_starts[request]
        rows, requests = partial(_spread, at, shape.num_rows), shape.requests
        last = batch.last_tokens
        padded = StepBatch(
            token_ids=rows(batch.token_ids, 0),
            key_indices=rows(batch.key_indices, 0),
            positions=rows(batch.positions, 0),
            query_starts=np.arange(requests + 1, dtype=np.int32) * shape.rows,
            context_lens=_fill(batch.context_lens, (len(batch.slots), requests), 1),
            slots=rows(batch.slots, -1),
            block_tables=_fill(batch.block_tables, (len(batch.slots), requests, self.width), -1),
            sample_rows=np.arange(shape.num_rows, dtype=np.int32),
            adapter_rows=None if adapters is None else rows(adapters, -1),
            last_tokens=None if last is None else replace(last, sources=rows(last.sources, -1)),
        )
        return PaddedStep(padded, shape, at[batch.sample_rows])


def step_to_capture(shape: GraphShape, width: int, num_groups: int, num_axes: int = 1) -> StepBatch:
    """Returns the step to capture: rows that write no KV, with full tables of `width` blocks,
    windows that start at the first key, and positions on `num_axes` axes.
    """
    requests, num_rows = shape.requests, shape.num_rows
    context = width * BLOCK_SIZE
    return StepBatch(
        token_ids=np.zeros(num_rows, np.int32),
        key_indices=np.zeros(num_rows, np.int32),
        positions=np.zeros((num_axes, num_rows), np.int32),
        query_starts=np.arange(requests + 1, dtype=np.int32) * shape.rows,
        context_lens=np.full((num_groups, requests), context, np.int32),
        slots=np.full((num_groups, num_rows), -1, np.int32),
        block_tables=np.zeros((num_groups, requests, width), np.int32),
        sample_rows=np.arange(num_rows, dtype=np.int32),
        adapter_rows=np.full(num_rows, -1, np.int32) if shape.adapters else None,
    )


def _is_generation(batch: StepBatch) -> bool:
    """Returns whether every request has rows, some row is sampled, and the step has only inputs
    that graphs read.
    """
    absent = (batch.hidden, batch.input_rows, batch.limits, batch.copies)
    return (
        len(batch.token_ids) > 0
        and len(batch.sample_rows) > 0
        and all(array is None for array in absent)
        and int(batch.query_starts[-1]) == len(batch.token_ids)
        and bool((np.diff(batch.query_starts) > 0).all())
    )


def _spread(
    at: NDArray[np.int64], num_rows: int, array: NDArray[np.int32], value: int
) -> NDArray[np.int32]:
    """Puts the last axis' elements at `at` among `num_rows`; the others are `value`."""
    spread = np.full((*array.shape[:-1], num_rows), value, np.int32)
    spread[..., at] = array
    return spread


def _fill(array: NDArray[np.int32], shape: tuple[int, ...], value: int) -> NDArray[np.int32]:
    filled = np.full(shape, value, np.int32)
    filled[tuple(slice(0, length) for length in array.shape)] = array
    return filled
