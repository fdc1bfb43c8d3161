"""How much of the memory that is reserved for K and V holds any: the utilisation that paging is for
(PagedAttention, Kwon et al. 2023).

Looks on from the core, step by step. Reserved are the blocks that requests hold, or what the worker
reports where it gives memory on demand; used is what tokens fill of them, shared blocks counted
once. Beside it stands what one range of the longest context for each request would take.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.protocol.stats import KvBytes
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.engine.scheduler.scheduler import Scheduler


class KvMeter:
    """The meter of one engine. `block_bytes` holds the bytes of a block for each cache group;
    without them nothing is measured.
    """

    def __init__(self, block_bytes: Sequence[int] = (), *, max_model_len: int = 0) -> None:
        self.now = KvBytes()
        self.sums = KvBytes()
        """Sums over all steps that computed something."""
        self._block_bytes = block_bytes
        self._max_model_len = max_model_len
        self._token_bytes = 0.0
        """Bytes that one more token of a row fills."""

    def observe(self, plan: StepPlan, result: StepResult, scheduler: Scheduler) -> None:
        """Measures a step between its end and its update: its tokens are computed, and no block is
        free yet.
        """
        if not plan.rows or not self._block_bytes:
            return
        blocks = scheduler.blocks
        running = [row for request in scheduler.queues.running for row in request.rows]
        num_computed = sum(row.num_computed_tokens for row in running) + plan.num_tokens
        tables = [blocks.tables[row.request_id] for row in running]
        used = reserved = whole = growing = 0.0
        for group, (pool, block_bytes) in enumerate(
            zip(blocks.pools, self._block_bytes, strict=True)
        ):
            num_held = pool.num_blocks - len(pool.free)
            reserved += num_held * block_bytes
            if not pool.spec.grows:  # all of it is used, whatever the number of tokens
                used += num_held * block_bytes
                whole += num_held * block_bytes
                continue
            growing += block_bytes
            num_empty_tokens = (
                sum(len(table[group]) for table in tables) * blocks.block_size - num_computed
            )
            used += (num_held - num_empty_tokens / blocks.block_size) * block_bytes
            whole += len(running) * -(-self._max_model_len // blocks.block_size) * block_bytes
        self._token_bytes = growing / blocks.block_size
        self.now = KvBytes(used, reserved if result.kv_bytes is None else result.kv_bytes, whole)
        self.sums += self.now

    def repeat(self, plan: StepPlan, num_steps: int) -> None:
        """Measures the decode steps of a plan after its first: each row fills a token in each."""
        if not self._block_bytes:
            return
        now, step_bytes = self.now, len(plan.rows) * self._token_bytes
        self.sums += KvBytes(
            num_steps * (now.used + (num_steps + 1) / 2 * step_bytes),
            num_steps * now.reserved,
            num_steps * now.whole_contexts,
        )
        self.now = KvBytes(now.used + num_steps * step_bytes, now.reserved, now.whole_contexts)
