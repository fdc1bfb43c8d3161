"""Runs Programs over paged KV in shuffled blocks: whole, in chunks, or many requests at once.

Serves the equivalence tests of any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import Backend, BackendOptions, LoadWeight
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from octavo.program.ops import Embedding, original_context
from octavo.program.program import Program
from octavo.worker.loaded_model import get_common_layouts


@dataclass
class Request:
    """A request's tokens, and how many of the KV entries of each group are written."""

    token_ids: Sequence[int]
    blocks: NDArray[np.int32]
    """Block ids by group, `[G, B]`."""
    written: dict[str, int] = field(default_factory=dict)
    adapter: int = -1
    """Slot of its adapter; -1: none."""
    second_start: int = 1 << 30
    """Index of the first token of the second text, where it is a pair."""
    first_position: int = 0
    """Position of its first token."""


def backend_named(name: str, **options: Any) -> Backend:
    """Returns the backend of that name, on one thread unless told otherwise."""
    kinds = {"reference": ReferenceBackend, "torch": TorchBackend, "native": NativeBackend}
    return kinds[name](BackendOptions(**{"num_threads": 1} | options))


class PagedRunner:
    """One model's Programs with a KV cache of their own; `add` makes a request, `step` computes
    some of its tokens.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend | None = None,
        *,
        load: LoadWeight | None = None,
        num_blocks: int = 256,
        seed: int = 0,
        padding: int = 0,
        rewrite: Callable[[Program], Program] = lambda program: program,
    ) -> None:
        """Prepares the model's Programs, except those of towers.

        `load` gives weights in another precision than the file's; `padding` rows with slot -1 are
        put behind every step's; `rewrite` is a pass over each Program.
        """
        checkpoint = open_checkpoint(path)
        self.backend = backend or ReferenceBackend()
        self.programs = {
            name: rewrite(program)
            for name, program in build_programs(checkpoint.config).items()
            if "rows" not in program.outputs
        }
        if load is None:
            load = WeightReader(checkpoint).load
            for program in self.programs.values():
                formats = loaded_formats(checkpoint, "auto", None, program)
                self.backend.check(program, formats)
        self.runnables = {
            name: self.backend.prepare_program(program, load)
            for name, program in self.programs.items()
        }
        self.groups = next(iter(self.programs.values())).groups
        self.layouts = get_common_layouts(self.runnables)
        self.kv = self.backend.allocate(self.layouts, [num_blocks] * len(self.groups))
        generator = np.random.default_rng(seed)
        self._free = [list(generator.permutation(num_blocks)) for _ in self.groups]
        self._padding = padding

    def add(
        self, token_ids: Sequence[int], context: int | None = None, *, adapter: int = -1
    ) -> Request:
        """Makes a request with blocks for `context` tokens (default: as many as it has) in every
        group.
        """
        count = -(-(context or len(token_ids)) // BLOCK_SIZE)
        blocks = np.array([[free.pop() for _ in range(count)] for free in self._free], np.int32)
        for table, group in zip(blocks, self.groups, strict=True):
            if group.kind == "state":
                table[:] = table[0]
        original = original_context(next(iter(self.programs.values())))
        first = original.first_position(context or len(token_ids))
        return Request(token_ids, blocks, adapter=adapter, first_position=first)

    def step(
        self,
        spans: Iterable[tuple[Request, int, int]],
        program: str = "decoder",
        *,
        sample: bool = True,
    ) -> dict[str, NDArray[Any]]:
        """Computes tokens start .. stop - 1 of each request and returns every row's outputs, in
        order (of no row without `sample`).
        """
        spans = list(spans)
        batch = self.batch(spans, self.programs[program])
        if not sample:
            batch.sample_rows = batch.sample_rows[:0]
        return self.runnables[program].run(batch, self.kv).arrays

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None, *, adapter: int = -1
    ) -> NDArray[Any]:
        """Returns the logits `[T, V]` of one request alone, `chunk` tokens a step."""
        request = self.add(token_ids, adapter=adapter)
        size = chunk or len(token_ids)
        spans = [
            (start, min(start + size, len(token_ids))) for start in range(0, len(token_ids), size)
        ]
        return np.concatenate(
            [self.step([(request, start, stop)])["logits"] for start, stop in spans]
        )

    def batch(self, spans: list[tuple[Request, int, int]], program: Program) -> StepBatch:
        written = {op.group for op in program.ops if type(op).__name__ == "KvWrite"}
        key_indices = np.concatenate([np.arange(start, stop) for _, start, stop in spans]).astype(
            np.int32
        )
        slots = np.full((len(self.groups), len(key_indices)), -1, np.int32)
        context_lens = np.zeros((len(self.groups), len(spans)), np.int32)
        row = 0
        for index, (request, start, stop) in enumerate(spans):
            at = np.arange(start, stop)
            for g, group in enumerate(self.groups):
                if group.name in written or group.kind == "state":
                    slots[g, row : row + stop - start] = (
                        request.blocks[g, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                    )
                    request.written[group.name] = stop
                context_lens[g, index] = request.written.get(group.name, 0)
            row += stop - start
        segments = [np.arange(a, b) >= request.second_start for request, a, b in spans]
        width = max(request.blocks.shape[1] for request, _, _ in spans)
        tables = np.full((len(self.groups), len(spans), width), -1, np.int32)
        for index, (request, _, _) in enumerate(spans):
            tables[:, index, : request.blocks.shape[1]] = request.blocks
        batch = self._padded(spans, key_indices, slots, context_lens, tables)
        firsts = [np.full(stop - start, request.first_position) for request, start, stop in spans]
        batch.positions[0, : len(key_indices)] += np.concatenate(firsts).astype(np.int32)
        if len(batch.positions) > 1:
            batch.positions[1, : len(key_indices)] = np.concatenate(segments)
        return batch

    def _positions(self, key_indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the key indices on the first axis and segment 0 on a second one, `[P, T]`."""
        ops = (op for program in self.programs.values() for op in program.ops)
        last_axis = max((op.axis for op in ops if isinstance(op, Embedding)), default=0)
        return np.stack([key_indices, *[np.zeros_like(key_indices)] * last_axis])

    def _padded(
        self,
        spans: list[tuple[Request, int, int]],
        key_indices: NDArray[np.int32],
        slots: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> StepBatch:
        pad = self._padding
        ids = np.concatenate(
            [np.asarray(request.token_ids[start:stop]) for request, start, stop in spans]
        ).astype(np.int32)
        starts = np.cumsum([0, *(stop - start for _, start, stop in spans)]).astype(np.int32)
        padded = np.concatenate([key_indices, np.full(pad, 3, np.int32)])
        adapters = [np.full(stop - start, request.adapter) for request, start, stop in spans]
        adapter_rows = np.concatenate([*adapters, np.full(pad, -1)]).astype(np.int32)
        return StepBatch(
            token_ids=np.concatenate([ids, np.full(pad, 7, np.int32)]),
            key_indices=padded,
            positions=self._positions(padded),
            query_starts=starts,
            context_lens=context_lens,
            slots=np.concatenate([slots, np.full((len(slots), pad), -1, np.int32)], axis=1),
            block_tables=tables,
            sample_rows=np.arange(len(ids), dtype=np.int32),
            adapter_rows=adapter_rows if adapter_rows.max(initial=-1) >= 0 else None,
        )
