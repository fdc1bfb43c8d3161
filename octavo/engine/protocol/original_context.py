"""Original context of LongRoPE (Ding et al. 2024): the length up to which a model uses its original
rotary angles, and the first position of longer requests.

All keys of a request are rotated with one set of angles. Positions select the set: a request that
exceeds the original context has positions beyond it, for which the model's table has the long
angles. The scheduler recomputes a request that grows beyond the original context; block hashes
include the first position.
"""

from __future__ import annotations

import msgspec

from octavo.engine.protocol.kv_cache_spec import UNBOUNDED


class OriginalContext(msgspec.Struct, frozen=True):
    """Length of the longest request whose positions begin at 0."""

    num_tokens: int = UNBOUNDED

    def first_position(self, num_tokens: int) -> int:
        """Returns the position of the first token of a request of `num_tokens`."""
        return 0 if num_tokens <= self.num_tokens else self.num_tokens


ONE_CONTEXT = OriginalContext()
"""Context of a model with one set of angles for all lengths."""
