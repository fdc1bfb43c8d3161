"""The context up to which a model's rotary angles are its original ones (LongRoPE, Ding et al.
2024), and where the positions of longer requests begin.

All keys of a request are turned by one set of angles. Positions tell which: those of a request that
has outgrown the original context begin where the original ones end, and the model's table of angles
has the long ones there. Known to the scheduler, which has such a request computed once more, and to
everything that lays out or names its blocks.
"""

from __future__ import annotations

import msgspec

from octavo.engine.protocol.kv_cache_spec import UNBOUNDED


class OriginalContext(msgspec.Struct, frozen=True):
    """The longest request whose positions begin at 0."""

    num_tokens: int = UNBOUNDED

    def first_position(self, num_tokens: int) -> int:
        """Returns the position of the first token of a request of `num_tokens`."""
        return 0 if num_tokens <= self.num_tokens else self.num_tokens


ONE_CONTEXT = OriginalContext()
"""Every length has the same angles."""
