"""Request for a pooled row of its prompt; samples no token.

Implements `ResultConsumer`. It ends with the step that computes its last token.
"""

from __future__ import annotations

from octavo.api.pooling_params import PoolingParams
from octavo.engine.protocol.step import RowResult, Wants
from octavo.engine.requests.generation import Finish, RequestProgress, SequenceState


class Pooling:
    """Consumer of one pooled row."""

    wants: Wants = "pool"
    reads_logprobs = False
    num_seqs = 1
    beams: tuple[SequenceState, ...] = ()
    may_draft = False
    may_branch = False
    samples_sequentially = False
    needs_last_token = ""

    def __init__(self, params: PoolingParams) -> None:
        self.row_params = params

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        """No-op: no tokens follow the prompt."""

    def num_plain_draws(self, num_tokens: int) -> int:
        return 1

    def take(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress:
        """Returns the pooled row and ends the request."""
        assert result.pooled is not None, "a row without a fault has what it wants"
        return RequestProgress(0, pooled=result.pooled, is_first=True, finish=Finish("stop"))

    def start_over(self, token_ids: list[int]) -> list[int]:
        return token_ids
