"""A draft model or draft head: proposes the next tokens of rows one after another, with each row's
sampling params.

Its K and V are in separate cache groups with the same block tables. After a step, the blocks filled
by the step are also filled for the draft model, so that prefix hits, swaps and forks include both.
Tokens after the last full block are computed only when drafts are requested, so steps without
drafts cost little. The scheduler decides which rows get drafts and which drafts are verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.executor.base import Runnable
from octavo.executor.kv import BLOCK_SIZE, KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_input import ModelInput, gather
from octavo.worker.sampling.draft_sampling import DraftSampling, DraftVocabulary


@dataclass(slots=True)
class RowToDraft:
    """Tokens of one row to compute in a step of the draft model."""

    row: int
    """Index of the permanent row."""
    start: int
    end: int
    """Number of its computed tokens after the step."""
    max_drafts: int
    """Maximum number of draft tokens; 0: none."""
    draft_ids: list[int] = field(default_factory=list)
    num_known: int = 0
    """Number of known tokens before the draft tokens; the model has computed all but the last."""
    others: list[tuple[int, int]] = field(default_factory=list)
    """Alternatives to draft tokens: the number of draft tokens before each one, and its id."""

    def get_draft(self) -> tuple[list[int], list[int]]:
        """Returns the draft tokens with their alternatives, and the parent of each. The parents are
        [] if the tokens are a chain.
        """
        if not self.others:
            return self.draft_ids, []
        ids = [token_id for _, token_id in self.others]
        parents = [num_before - 1 for num_before, _ in self.others]
        return self.draft_ids + ids, [*range(-1, len(self.draft_ids) - 1), *parents]


class DraftModel:
    """Runs the Program of a draft model over the rows of the target model."""

    def __init__(
        self,
        runnable: Runnable,
        kv: KvCache,
        rows: InputBatch,
        *,
        ids: DraftVocabulary,
        max_tokens: int,
        features: int | None = None,
        reads_keys: bool = False,
        tree_width: int = 1,
    ) -> None:
        """`max_tokens`: maximum number of tokens in a step. `features`: cache group of the features
        that a draft head reads. `reads_keys`: the head has no KV and reads the model's, which are
        in the groups before `features`. `tree_width`: number of draft tokens at each position.
        """
        self.runnable = runnable
        self._kv = kv
        self._rows = rows
        self._ids = ids
        self._max_tokens = max_tokens
        self._features = features
        self._reads_keys = reads_keys
        self._width = tree_width
        self._followed: dict[int, tuple[str, int]] = {}
        """Request in each permanent row, and the number of its tokens whose K and V are
        computed.
        """

    def follow(self, scheduled: Sequence[ScheduledRequest], results: Sequence[RowResult]) -> None:
        """Computes the blocks that a step has filled, and adds draft tokens to the results of rows
        that request them.
        """
        shares = [
            self._share(row, index, result)
            for row, index, result in zip(
                scheduled, self._rows.indices(scheduled).tolist(), results, strict=True
            )
        ]
        for planned, share in zip(scheduled, shares, strict=True):
            self._followed[share.row] = (planned.request_id, share.end)
        self._shorten(shares)
        for part in self._parts([share for share in shares if share.end > share.start]):
            self._draft(part)
        for share, result in zip(shares, results, strict=True):
            if not result.draft_ids:
                result.draft_ids, result.draft_parents = share.get_draft()

    def _share(self, planned: ScheduledRequest, row: int, result: RowResult) -> RowToDraft:
        """Returns the tokens of a row to compute: the accepted ones if they fill a block, and the
        last known ones if the row requests draft tokens.
        """
        first = self._first(planned, row)
        end = planned.start + result.num_kept
        fills = not self._reads_keys and end // BLOCK_SIZE > first // BLOCK_SIZE
        share = RowToDraft(row, first, end if fills else first, 0)
        if not planned.propose or not result.token_ids or result.failure is not None:
            return share
        num_known = planned.start + planned.num_tokens - len(planned.draft_ids)
        num_known += len(result.token_ids)
        room = self._rows.num_placed_tokens(row) - num_known
        room = min(room, self._rows.token_ids.shape[1] - 2 - num_known)
        if num_known > share.start and room >= 0:
            share.end, share.max_drafts = num_known, min(planned.propose, room + 1)
            share.num_known = num_known
            share.start = num_known - 1 if self._reads_keys else share.start
        return share

    def _first(self, planned: ScheduledRequest, row: int) -> int:
        """Returns the index of the first token of a row whose K and V may be missing. Full blocks
        are complete; the last block may be incomplete if the row was preempted or started with
        cached blocks.
        """
        first = planned.start // BLOCK_SIZE * BLOCK_SIZE
        request_id, num_followed = self._followed.get(row, ("", 0))
        is_known = request_id == planned.request_id and num_followed <= planned.start
        return max(first, num_followed) if is_known else first

    def _shorten(self, shares: Sequence[RowToDraft]) -> None:
        """Computes the first tokens of rows that have more tokens than fit in a step."""
        for share in shares:
            while share.end - share.start > self._max_tokens:
                end = share.start + self._max_tokens
                self._compute([RowToDraft(share.row, share.start, end, 0)])
                share.start = end

    def _parts(self, shares: Sequence[RowToDraft]) -> Iterator[list[RowToDraft]]:
        """Yields the rows in groups that fit in a step."""
        part: list[RowToDraft] = []
        for share in shares:
            num_tokens = sum(other.end - other.start for other in part) + share.end - share.start
            if part and num_tokens > self._max_tokens:
                yield part
                part = []
            part.append(share)
        if part:
            yield part

    def _draft(self, part: list[RowToDraft]) -> None:
        """Computes a group of rows, then drafts token by token."""
        self._compute(part)
        while part := [share for share in part if len(share.draft_ids) < share.max_drafts]:
            self._compute(part)

    def _compute(self, part: list[RowToDraft]) -> None:
        """Computes the next tokens of rows, and samples a draft token for each row that requests
        one. A row stops drafting when it samples a token that the target model does not have.
        """
        batch = gather(
            self._rows,
            np.array([share.row for share in part], np.intp),
            np.array([share.end for share in part], np.int32),
            np.cumsum([0, *(share.end - share.start for share in part)], dtype=np.int32),
        )
        batch.adapter_rows = None
        np.minimum(batch.token_ids, self._ids.num_inputs - 1, out=batch.token_ids)
        drafting = [index for index, share in enumerate(part) if share.max_drafts]
        batch.sample_rows = batch.query_starts[1:][drafting] - 1
        if self._features is not None:
            _keep_slots(batch.slots[self._features], batch.sample_rows)
        if self._reads_keys:
            self._stay_at_known_tokens(batch, part)
        rows = batch.rows[drafting]
        ends = np.array([part[index].end for index in drafting], np.int32)
        sampling = DraftSampling.build(rows, ends, self._rows.sampling, self._ids, self._width)
        batch.sampling = sampling.make_batch()
        samples = self.runnable.run(batch, self._kv).samples
        assert samples is not None
        for entry, index in enumerate(drafting):
            self._append(part[index], sampling.get_draft_ids(samples, entry))

    def _stay_at_known_tokens(self, batch: ModelInput, part: Sequence[RowToDraft]) -> None:
        """Gives all draft tokens of a row the position of its last known token, and the keys of the
        tokens before it: the model has not computed any others.
        """
        num_drafted = np.array([share.end - share.num_known for share in part], np.int32)
        batch.positions = batch.positions - num_drafted
        batch.context_lens[: self._features] -= num_drafted + 1

    def _append(self, share: RowToDraft, token_ids: list[int]) -> None:
        if not token_ids:
            share.max_drafts = 0
            return
        token_id, *others = token_ids
        share.others += [(len(share.draft_ids), other) for other in others]
        share.draft_ids.append(token_id)
        self._rows.token_ids[share.row, share.end] = token_id
        share.start, share.end = share.end, share.end + 1


def _keep_slots(slots: NDArray[np.int32], written_rows: NDArray[np.int32]) -> None:
    """Removes the slots of all rows except `written_rows`: a draft head writes features only for
    tokens that the target model has not computed yet.
    """
    own = slots[written_rows].copy()
    slots[:] = -1
    slots[written_rows] = own
