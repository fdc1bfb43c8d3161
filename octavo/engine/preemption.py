"""How a request gives up its blocks: to host memory, or to be computed again; whichever is measured cheaper where both are allowed.

Returns a list of moves, or None for recomputation. Measures nothing: the rates are arguments.
"""

from __future__ import annotations

from typing import Literal

from octavo.engine.block_manager import BlockManager
from octavo.engine.rates import Rates
from octavo.engine.request import Request
from octavo.step import BlockMove

Mode = Literal["auto", "swap", "recompute"]


class Preemption:
    """`auto` swaps while a rate is unknown: the first swap measures it."""

    def __init__(self, blocks: BlockManager, mode: Mode) -> None:
        self._blocks = blocks
        self._mode = mode

    def swap_out(self, request: Request, rates: Rates) -> list[BlockMove] | None:
        """All blocks of the request's computed tokens, moved to the host; None, and nothing done, where it is to be computed again."""
        computed = {row.request_id: row.num_computed_tokens for row in request.rows}
        num_tokens = sum(computed.values())
        if num_tokens == 0 or self._mode == "recompute" or (self._mode == "auto" and not self._is_swap_cheaper(num_tokens, rates)):
            return None
        return self._blocks.swap_out(computed)

    def _is_swap_cheaper(self, num_tokens: int, rates: Rates) -> bool:
        """Out and in again, against a prefill of which nothing is found in the prefix cache; what beams share counts twice in both."""
        if rates.swap_blocks_per_s is None or rates.prefill_tokens_per_s is None:
            return True
        num_blocks = len(self._blocks.pools) * -(-num_tokens // self._blocks.block_size)
        return 2 * num_blocks / rates.swap_blocks_per_s < num_tokens / rates.prefill_tokens_per_s
