"""One permanent row per running request: its tokens, its block tables, its sampling state.

A step's arrays are gathers from these rows, so that Python's work does not grow with the length of
a request. A row comes with a NewRow and goes when the request finishes or is preempted; the
scheduler decides which request has one, and what it may compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.kv import BLOCK_SIZE
from octavo.pooling_params import PoolingParams
from octavo.ports import Grammars
from octavo.step import NewRow, ScheduledRow
from octavo.worker.block_places import BlockPlaces
from octavo.worker.grammar_rows import GrammarRows
from octavo.worker.sampling_rows import SamplingRows

NO_TOKENS = np.zeros(0, np.int32)

NO_SECOND = np.iinfo(np.int32).max
"""Start of the second text of a row that is one text."""


class RequestRows:
    """The rows of up to `N` requests of `context` tokens in `G` cache groups."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_model_len: int,
        num_groups: int,
        vocab_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        max_blocks = -(-max_model_len // BLOCK_SIZE)
        self.token_ids = np.zeros((max_rows, max_model_len + 1), np.int32)
        """Token ids known so far, `[N, context + 1]`."""
        self.block_tables = np.full((num_groups, max_rows, max_blocks), -1, np.int32)
        """Places of the rows' blocks, `[G, N, B]`, padded with -1."""
        self.num_prompt_tokens = [0] * max_rows
        self._end_token_ids = [NO_TOKENS] * max_rows
        self.grammars = GrammarRows(grammars, vocab_size)
        self.sampling = SamplingRows(
            max_rows=max_rows, vocab_size=vocab_size, grammars=self.grammars
        )
        self.pooling: dict[int, PoolingParams] = {}
        """Params of the rows that want a pooled row, by permanent row."""
        self.second_starts = np.full(max_rows, NO_SECOND, np.int32)
        """Index of the first token of a pair's second text, `[N]`."""
        self._num_blocks = [[0] * max_rows for _ in range(num_groups)]
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def free(self, request_id: str, places: BlockPlaces) -> None:
        """Gives a request's row back; one without a row is left alone."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        places.clear(row)
        self.block_tables[:, row] = -1
        self.sampling.free(row)
        self.grammars.free(row)
        self.pooling.pop(row, None)
        self._free.append(row)

    def add(self, new: NewRow) -> None:
        """Gives a request a row; where that raises, the row is still its own, and can be freed."""
        row = self._free.pop()
        self._row_of[new.request_id] = row
        for num_blocks in self._num_blocks:
            num_blocks[row] = 0
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self._end_token_ids[row] = np.array(new.end_token_ids, np.int32)
        if isinstance(new.params, PoolingParams):
            self.pooling[row] = new.params
            self.second_starts[row] = NO_SECOND if new.second_start is None else new.second_start
            return
        self.grammars.add(row, new)
        self.sampling.add(row, new)

    def update_tables(self, scheduled: ScheduledRow, places: BlockPlaces) -> None:
        """Takes in the blocks that a plan adds to a row or replaces, by their places."""
        row = self._row_of[scheduled.request_id]
        for group, added in enumerate(scheduled.new_block_ids):
            first = self._num_blocks[group][row]
            self.block_tables[group, row, first : first + len(added)] = places.put(
                group, row, first, added
            )
            self._num_blocks[group][row] = first + len(added)
        for group, index, block_id in scheduled.replaced_blocks:
            self.block_tables[group, row, index] = places.put(group, row, index, [block_id])[0]

    def indices(self, scheduled: Sequence[ScheduledRow]) -> NDArray[np.intp]:
        """Returns the rows of a step's requests, `[R]`."""
        row_of = self._row_of
        return np.array([row_of[entry.request_id] for entry in scheduled], np.intp)

    def end_tokens(self, rows: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the tokens that end `rows [R]`, all in one array, and `[R+1]` where each row's
        begin in it.
        """
        ids = [self._end_token_ids[row] for row in rows.tolist()]
        starts = np.zeros(len(ids) + 1, np.int32)
        np.cumsum([len(some) for some in ids], out=starts[1:])
        return np.concatenate(ids), starts

    def append(
        self, rows: NDArray[np.intp], ends: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> None:
        """Takes in the sampled tokens `[S]` of `rows [S]`, at the positions `ends [S]`."""
        self.token_ids[rows, ends] = token_ids
        if self.sampling.has_extras:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                self.sampling.took(row, token_id)
                self.grammars.took(row, token_id)
