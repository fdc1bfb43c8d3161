"""Chooses how a preempted request gives up its KV blocks: swapped to host memory, or recomputed."""

from __future__ import annotations

from typing import Literal

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.requests.request import Request
from octavo.engine.scheduler.step_builder import StepBuilder

Mode = Literal["auto", "swap", "recompute"]


class PreemptionPolicy:
    """Chooses how a request gives up its blocks. `auto` swaps while a cost is unknown: the first
    swap measures it.
    """

    def __init__(self, blocks: BlockManager, mode: Mode) -> None:
        self._blocks = blocks
        self._mode = mode

    def swap_out(self, request: Request, builder: StepBuilder) -> list[BlockMove] | None:
        """Returns the moves that bring all blocks of the request to the host; None, with nothing
        done, where it is to be computed again.
        """
        computed = {row.request_id: row.num_computed_tokens for row in request.rows}
        num_tokens = sum(computed.values())
        if (
            num_tokens == 0
            or self._mode == "recompute"
            or (self._mode == "auto" and not self._is_swap_cheaper(num_tokens, builder))
        ):
            return None
        return self._blocks.swap_out(computed)

    def _is_swap_cheaper(self, num_tokens: int, builder: StepBuilder) -> bool:
        """Compares blocks moved out and in again with a prefill that finds nothing in the prefix
        cache. Blocks that beams share count twice in both.
        """
        swap_blocks_per_s = builder.costs.swap_blocks_per_s
        prefill_s = builder.costs.prefill_s(num_tokens, builder.max_chunk)
        if swap_blocks_per_s is None or prefill_s is None:
            return True
        num_blocks = len(self._blocks.pools) * -(-num_tokens // self._blocks.block_size)
        return 2 * num_blocks / swap_blocks_per_s < prefill_s
