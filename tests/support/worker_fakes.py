"""A Runnable with the pseudo-model of `tests.support.engine_fakes`, which reads its tokens back
through slots and block tables as kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import PAGESIZE

import numpy as np

from octavo.executor.base import Runnable
from octavo.executor.batch import SampleResult, StepBatch, StepOutput
from octavo.executor.kv import BLOCK_SIZE
from octavo.worker.block_map import RangeShape, VirtualBlockMap
from octavo.worker.cache_engine import CacheEngine, HostShape
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_runner import ModelRunner
from octavo.worker.program_runners import ProgramRunners
from octavo.worker.worker import Worker
from tests.support.engine_fakes import VOCAB, pseudo_token


class FakeKv:
    """KV memory that holds tokens; -7 where nothing is written, or where it was given back."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self.tokens = np.full((num_groups, num_blocks * BLOCK_SIZE), -7, np.int64)

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        self.tokens[group, first_block * BLOCK_SIZE : (first_block + num_blocks) * BLOCK_SIZE] = -7

    def spans(self, group: int) -> list[tuple[int, int]]:
        raise NotImplementedError

    def copy_block(self, group: int, source: int, target: int) -> None:
        blocks = self.tokens[group].reshape(-1, BLOCK_SIZE)
        blocks[target] = blocks[source]

    def read_block(self, group: int, block_id: int, into: np.ndarray) -> None:
        into.view(np.int64)[:] = self.tokens[group].reshape(-1, BLOCK_SIZE)[block_id]

    def write_block(self, group: int, block_id: int, data: np.ndarray) -> None:
        self.tokens[group].reshape(-1, BLOCK_SIZE)[block_id] = data.view(np.int64)


class FakeRunnable(Runnable):
    backend_name = "fake"
    weight_bytes = 0
    progress = 0

    def __init__(self, windows: Sequence[int | None] | None = None) -> None:
        """`windows`: keys that a query reads, by group; None for all, which at least one group
        reads.
        """
        self.windows = windows
        self.batches: list[StepBatch] = []
        self.raise_on: int | None = None
        """A token whose presence in a step raises."""
        self.nan_on: int | None = None
        """A token after which the logits are NaN."""
        self.error: Exception = RuntimeError("kernel fault")

    def run(self, batch: StepBatch, kv: FakeKv, verify: object = None) -> StepOutput:
        self.batches.append(batch)
        if self.raise_on is not None and self.raise_on in batch.token_ids:
            raise self.error
        kv.tokens[np.arange(len(kv.tokens))[:, None], batch.slots] = batch.token_ids
        sampling = batch.sampling
        drawn = [self._draw(batch, kv, entry) for entry in range(len(batch.sample_rows))]
        token_ids = np.array(drawn, np.int32).reshape(-1)
        target_ids = sampling.records["target_id"]
        token_ids = np.where(target_ids >= 0, target_ids, token_ids).astype(np.int32)
        failed = (
            batch.token_ids[batch.sample_rows] == self.nan_on
            if self.nan_on is not None
            else np.zeros(len(token_ids), bool)
        )
        result = SampleResult(token_ids, failed)
        most = max(sampling.records["num_logprobs"], default=-1)
        if most >= 0:
            result.logprobs, result.ranks = -token_ids.astype(np.float32), token_ids + 1
            result.top_ids = np.tile(np.arange(most, dtype=np.int32), (len(token_ids), 1))
            result.top_logprobs = -result.top_ids.astype(np.float32)
        return StepOutput(result)

    def _draw(self, batch: StepBatch, kv: FakeKv, entry: int) -> int:
        row = batch.sample_rows[entry]
        request = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
        position = int(batch.key_indices[row])
        histories = []
        for group, tokens in enumerate(kv.tokens):
            assert batch.context_lens[group, request] > position
            table = batch.block_tables[group, request]
            window = self.windows[group] if self.windows else None
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            histories.append(
                [int(tokens[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE]) for p in seen]
            )
        longest = max(histories, key=len)
        assert all(history == longest[-len(history) :] for history in histories)
        return pseudo_token(longest, int(batch.sampling.records["sample_index"][entry]))


def make_worker(
    runnable: FakeRunnable,
    *,
    num_groups: int = 1,
    num_blocks: int = 64,
    max_rows: int = 8,
    max_model_len: int = 512,
    virtual: bool = False,
    is_alone: bool = True,
) -> Worker:
    rows = InputBatch(
        max_rows=max_rows, max_model_len=max_model_len, num_groups=num_groups, vocab_size=VOCAB
    )
    kv, block_map = FakeKv(num_groups, num_blocks), None
    if virtual:
        shape = RangeShape.build(num_blocks, -(-max_model_len // BLOCK_SIZE), (PAGESIZE,), 1)
        kv = FakeKv(num_groups, max_rows * shape.num_blocks)
        block_map = VirtualBlockMap(kv, [shape] * num_groups, num_rows=max_rows)
    cache_engine = CacheEngine(
        kv, [HostShape(num_blocks, 8 * BLOCK_SIZE)] * num_groups, block_map=block_map
    )
    runners = ProgramRunners({"decoder": ModelRunner(runnable, kv, rows)})
    return Worker(runners, cache_engine, rows, close=lambda: None, is_alone=is_alone)
