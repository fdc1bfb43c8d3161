"""How many decode steps one plan may hold: as many as can be computed one after another with
nothing to decide between them.

Python's share of a step is paid once for all of them. Returns a number, and gives the plan's rows
the blocks that these steps take; reads no clock. Source: multi-step scheduling (vLLM 0.6, 2024).
"""

from __future__ import annotations

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.scheduler.step_builder import StepBuilder

MAX_CALL_S = 0.1
"""Upper bound on the decode steps of one plan, in seconds (decision 0019). Requests and aborts end
them at once; the work of connectors waits for the next plan.
"""


class MultiStepPolicy:
    """Decides how many decode steps a plan holds, `max_num_steps` at most."""

    def __init__(self, blocks: BlockManager, max_num_steps: int) -> None:
        self._blocks = blocks
        self._max_num_steps = max_num_steps

    def num_steps(self, builder: StepBuilder, *, num_running: int) -> int:
        """Returns the decode steps of a step that is composed, while no request waits, and grants
        its rows the blocks for the tokens of all of them.
        """
        num_steps = self._allowed(builder, num_running)
        while num_steps > 1 and not self._reserve(builder, num_steps):
            num_steps //= 2
        return max(1, num_steps)

    def _allowed(self, builder: StepBuilder, num_running: int) -> int:
        """Returns the number without a look at blocks: all running requests decode, no block
        moves, and before the last step none ends or draws in another way.
        """
        if (
            self._max_num_steps == 1
            or builder.moves
            or builder.has_prompt
            or not builder.rows
            or len(builder.rows) != num_running
        ):
            return 1
        num_keys = sum(row.start + 1 for row in builder.rows)
        step_s = builder.costs.step_s(len(builder.rows), num_keys)
        if not step_s:
            return 1
        most = min(self._max_num_steps, int(MAX_CALL_S / step_s))
        if most < 2 or not all(row.wants == "draw" and row.num_tokens == 1 for row in builder.rows):
            return 1
        ends = [
            self._blocks.names.step_end(row.request_id, row.start, row.start + most) - row.start
            for row in builder.rows
        ]
        return min(most, *ends, *(request.num_plain_draws for request, _ in builder.owners))

    def _reserve(self, builder: StepBuilder, num_steps: int) -> bool:
        """Grants blocks for all rows' tokens, or for none; returns which."""
        grants = self._blocks.reserve(
            {row.request_id: row.start + num_steps for row in builder.rows}
        )
        if grants is None:
            return False
        builder.add_blocks(grants)
        return True
