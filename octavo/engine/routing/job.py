"""A request in the form that routing policies use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingJob:
    """One request to place."""

    num_tokens: int
    """Tokens of its prompt."""
    names: Sequence[bytes] = ()
    """Digests of the prompt's full blocks, in order; () if no policy reads them."""
    block_size: int = 1
    """Number of tokens in a block."""
    session: bytes = b""
    """Value that is equal for all requests of a session."""

    def num_cached(self, num_blocks: int) -> int:
        """Returns how many tokens an engine that has the first `num_blocks` blocks need not
        compute. The last token is always computed.
        """
        return min(num_blocks * self.block_size, max(0, self.num_tokens - 1))
