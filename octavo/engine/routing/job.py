"""A request as a routing policy sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingJob:
    """One request to place."""

    num_tokens: int
    """Tokens of its prompt."""
    names: Sequence[bytes] = ()
    """Names of the prompt's full blocks, in their order; () if no policy reads them."""
    block_size: int = 1
    """Number of tokens in a block."""
    session: bytes = b""
    """Value that requests of one session have in common."""

    def num_cached(self, num_blocks: int) -> int:
        """Returns how many of its tokens an engine with its first `num_blocks` blocks need not
        compute: the last token is always computed.
        """
        return min(num_blocks * self.block_size, max(0, self.num_tokens - 1))
