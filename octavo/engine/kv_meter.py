"""Measures the utilisation of KV memory at each step (PagedAttention, Kwon et al. 2023).

Reserved bytes are the blocks that requests hold, or the bytes that the worker reports if it
allocates on demand; used bytes are those filled by tokens, shared blocks counted once. For
comparison, it also measures the bytes of a layout that reserves one contiguous range of maximum
context length for each request.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.protocol.stats import KvBytes
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.engine.scheduler.scheduler import Scheduler


class KvMeter:
    """Measures KV memory. `block_bytes` contains the bytes of a block by cache group; if it is
    empty, nothing is measured.
    """

    def __init__(self, block_bytes: Sequence[int] = (), *, max_model_len: int = 0) -> None:
        self.now = KvBytes()
        self.sums = KvBytes()
        """Sums over all steps that computed tokens."""
        self._block_bytes = block_bytes
        self._max_model_len = max_model_len
        self._token_bytes = 0.0
        """Bytes that one more token of a row fills."""

    def observe(self, result: StepResult, scheduler: Scheduler, num_tokens: int) -> None:
        """Measures a step of `num_tokens` after it has run and before the scheduler is updated: its
        tokens are computed, and no block has been freed.
        """
        if not self._block_bytes:
            return
        blocks = scheduler.blocks
        num_rows, num_computed = 0, num_tokens
        num_entries = [0] * len(blocks.pools)
        for request in scheduler.queues.running:
            for row in request.rows:
                num_rows += 1
                num_computed += row.num_computed_tokens
                for group, table in enumerate(blocks.tables[row.request_id]):
                    num_entries[group] += len(table)
        used = reserved = whole = growing = 0.0
        for pool, block_bytes, num_blocks in zip(
            blocks.pools, self._block_bytes, num_entries, strict=True
        ):
            num_held = pool.num_blocks - len(pool.free)
            reserved += num_held * block_bytes
            if not pool.spec.grows:  # fully used, whatever the number of tokens
                used += num_held * block_bytes
                whole += num_held * block_bytes
                continue
            growing += block_bytes
            num_empty_tokens = num_blocks * blocks.block_size - num_computed
            used += (num_held - num_empty_tokens / blocks.block_size) * block_bytes
            whole += num_rows * -(-self._max_model_len // blocks.block_size) * block_bytes
        self._token_bytes = growing / blocks.block_size
        if result.kv_bytes is not None:
            reserved = result.kv_bytes
        self.now = KvBytes(used, reserved, whole)
        self._add(used, reserved, whole)

    def _add(self, used: float, reserved: float, whole: float) -> None:
        sums = self.sums
        self.sums = KvBytes(sums.used + used, sums.reserved + reserved, sums.whole_contexts + whole)

    def repeat(self, plan: StepPlan, num_steps: int) -> None:
        """Measures the decode steps of a plan after its first; in each of them, every row computes
        one token.
        """
        if not self._block_bytes:
            return
        now, step_bytes = self.now, len(plan.rows) * self._token_bytes
        self._add(
            num_steps * (now.used + (num_steps + 1) / 2 * step_bytes),
            num_steps * now.reserved,
            num_steps * now.whole_contexts,
        )
        self.now = KvBytes(now.used + num_steps * step_bytes, now.reserved, now.whole_contexts)
