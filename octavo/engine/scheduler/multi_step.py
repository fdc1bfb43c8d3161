"""Multi-step decode: how many decode steps a plan has, as many as need no decision by the
scheduler.

Scheduling and preparing a step costs once for all of them. Source: multi-step scheduling (vLLM 0.6,
2024).
"""

from __future__ import annotations

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.scheduler.step_builder import StepBuilder

MAX_CALL_S = 0.1
"""Upper bound in seconds on the decode steps of one plan (decision 0019). Requests and aborts end
them at once; the work of connectors waits for the next plan.
"""


class MultiStepPolicy:
    """Decides how many decode steps a plan has, `max_num_steps` at most."""

    def __init__(self, blocks: BlockManager, max_num_steps: int) -> None:
        self._blocks = blocks
        self._max_num_steps = max_num_steps

    def num_steps(self, builder: StepBuilder, *, num_running: int) -> int:
        """Returns the number of decode steps of a plan while no request waits, and allocates the
        blocks for all of them. More than one only if all running requests decode, no block moves,
        and no request ends or samples in another way before the last step.
        """
        rows = builder.rows
        if self._max_num_steps == 1 or builder.moves or builder.has_prompt:
            return 1
        if not rows or len(rows) != num_running:
            return 1
        num_keys = 0
        for row in rows:
            if row.wants != "draw" or row.num_tokens != 1:
                return 1
            num_keys += row.start + 1
        step_s = builder.costs.step_s(len(rows), num_keys)
        if not step_s:
            return 1
        num_steps = min(self._max_num_steps, int(MAX_CALL_S / step_s))
        hashes = self._blocks.hashes
        for (request, _), row in zip(builder.owners, rows, strict=True):
            num_steps = min(num_steps, request.num_plain_draws)
            if hashes.has_checkpoints:
                end = hashes.step_end(row.request_id, row.start, row.start + num_steps)
                num_steps = end - row.start
        return self._reserve(builder, num_steps)

    def _reserve(self, builder: StepBuilder, num_steps: int) -> int:
        """Allocates the rows' blocks for `num_steps`, or for as many steps as there are blocks;
        returns their number.
        """
        while num_steps > 1:
            ends = {row.request_id: row.start + num_steps for row in builder.rows}
            added = self._blocks.reserve(ends)
            if added is not None:
                if added:
                    builder.add_blocks(added)
                return num_steps
            num_steps //= 2
        return 1
