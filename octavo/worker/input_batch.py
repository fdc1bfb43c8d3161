"""One permanent row per running request: its tokens, block tables and sampling state.

A step's arrays are gathered from these rows, so the work in Python does not grow with the length of
a request. A row is added with a NewRequest and freed when the request finishes or is preempted. The
scheduler decides which requests have rows, and what they compute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.api.pooling_params import PoolingParams
from octavo.engine.protocol.step import (
    EncoderInput,
    MediaItem,
    NewRequest,
    ScheduledRequest,
    TableLength,
)
from octavo.executor.kv import BLOCK_SIZE
from octavo.text.ports import Grammars
from octavo.worker.block_map import VirtualBlockMap
from octavo.worker.sampling.grammar_matchers import GrammarMatchers
from octavo.worker.sampling.logits_processors import LogitsProcessors
from octavo.worker.sampling.sampling_states import SamplingStates

NO_TOKENS = np.zeros(0, np.int32)

MAX_FORCED = 64
"""Maximum number of forced tokens that a step appends to a row."""

NO_SECOND = np.iinfo(np.int32).max
"""Start of the second text in rows with only one text."""


class InputBatch:
    """Rows of up to `N` requests of `context` tokens in `G` cache groups."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_model_len: int,
        num_groups: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        processors: LogitsProcessors | None = None,
        closes: bool = False,
        states: Collection[int] = (),
        input_groups: Collection[int] = (),
        max_encoder_len: int = 0,
        drafts_forced: bool = False,
        goes_without_blocks: bool = False,
        num_axes: int = 1,
    ) -> None:
        """`states`: groups with one block per request, which is repeated in the row's table.
        `input_groups`: groups with the keys of an encoder input of at most `max_encoder_len` rows.
        `closes`: complete structured outputs before their length limit. `drafts_forced`: use forced
        text as draft tokens. `goes_without_blocks`: rows may skip blocks; holes in a table then
        stand for keys that the row never reads, in every group. `num_axes`: axes of positions.
        """
        self.num_axes = num_axes
        self._drafts_forced = drafts_forced
        max_blocks = -(-max(max_model_len, max_encoder_len) // BLOCK_SIZE)
        self.token_ids = np.zeros((max_rows, max_model_len + 1), np.int32)
        """Token ids known so far, `[N, context + 1]`."""
        self.block_tables = np.full((num_groups, max_rows, max_blocks), -1, np.int32)
        """Indices of the rows' blocks, `[G, N, B]`, padded with -1. The block of a recurrent state
        is repeated at every index.
        """
        self.num_prompt_tokens = np.zeros(max_rows, np.int32)
        """Prompt length of each row, `[N]`."""
        self._end_token_ids = [NO_TOKENS] * max_rows
        self.grammars = GrammarMatchers(grammars, vocab_size)
        self.sampling = SamplingStates(
            max_rows=max_rows,
            vocab_size=vocab_size,
            grammars=self.grammars,
            processors=processors or LogitsProcessors({}, timeout_s=0),
            closes=closes,
        )
        self.pooling: dict[int, PoolingParams] = {}
        """Params of the rows to pool, by permanent row."""
        self.second_starts = np.full(max_rows, NO_SECOND, np.int32)
        """Index of the first token of a pair's second text, `[N]`."""
        self.first_positions = np.zeros(max_rows, np.int32)
        """Position of each row's first token, `[N]`."""
        self.adapters = np.full(max_rows, -1, np.int32)
        """Adapter slot of each row, -1: none, `[N]`."""
        self.media: dict[int, list[MediaItem]] = {}
        """Images of rows, by permanent row; only for rows with images."""
        self.input_groups = np.array(sorted(input_groups), np.intp)
        """Groups with the keys of the encoder input, `[I]`."""
        self.input_lens = np.zeros(max_rows, np.int32)
        """Number of encoder input rows of each request, `[N]`."""
        self.inputs: dict[int, EncoderInput] = {}
        """Encoder inputs, by permanent row."""
        self.num_unread = np.zeros(max_rows, np.int32)
        """Number of blocks at each row's start that it does not read, `[N]`."""
        self._goes_without_blocks = goes_without_blocks
        self._states = frozenset(states)
        self._num_blocks = [[0] * max_rows for _ in range(num_groups)]
        self.row_of: dict[str, int] = {}
        """Permanent row of each request, by request id."""
        self._free = list(range(max_rows - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.row_of

    def free(self, request_id: str, block_map: VirtualBlockMap | None) -> None:
        """Frees a request's row, if it has one."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        if block_map is not None:
            block_map.clear(row)
        self.block_tables[:, row] = -1
        if row in self.sampling.special_rows:
            self.grammars.free(row)
        self.sampling.free(row)
        self.pooling.pop(row, None)
        self.media.pop(row, None)
        self.adapters[row] = -1
        self.inputs.pop(row, None)
        self._free.append(row)

    def add(self, new: NewRequest) -> None:
        """Adds a request. If this fails, the request still has its row, which must be freed."""
        row = self._free.pop()
        self.row_of[new.request_id] = row
        for num_blocks in self._num_blocks:
            num_blocks[row] = 0
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.adapters[row] = new.adapter_slot
        self.first_positions[row] = new.first_position
        self.num_unread[row] = 0
        if new.media:
            self.media[row] = new.media
        if new.encoder_input is not None:
            self.inputs[row] = new.encoder_input
            self.input_lens[row] = new.encoder_input.num_tokens
        self._end_token_ids[row] = np.array(new.end_token_ids, np.int32)
        if isinstance(new.params, PoolingParams):
            self.pooling[row] = new.params
            self.second_starts[row] = NO_SECOND if new.second_start is None else new.second_start
            return
        # From here on, the row is in `special_rows`, so `free` also frees a failed matcher.
        self.sampling.add(row, new)
        if new.grammar is not None:
            self.grammars.add(row, new)

    def update_tables(self, scheduled: ScheduledRequest, block_map: VirtualBlockMap | None) -> None:
        """Sets the blocks that a plan adds to or replaces in a row's table: their ids, or their
        indices in the virtual layout `block_map`.
        """
        row = self.row_of[scheduled.request_id]
        for group, added in enumerate(scheduled.new_block_ids):
            first = self._num_blocks[group][row]
            # The single block of a state is repeated in the row's table.
            end = None if group in self._states and added else first + len(added)
            self.block_tables[group, row, first:end] = (
                added if block_map is None else block_map.put(group, row, first, added)
            )
            self._num_blocks[group][row] = first + len(added)
            if group == 0 and self._goes_without_blocks:
                self.num_unread[row] += added.count(-1)
        for group, index, block_id in scheduled.replaced_blocks:
            where = slice(None) if group in self._states else index
            if block_map is not None:
                (block_id,) = block_map.put(group, row, index, [block_id])
            self.block_tables[group, row, where] = block_id

    def shorten_table(self, end: TableLength, block_map: VirtualBlockMap | None) -> None:
        """Removes the blocks after the end of a row's table, if the request has a row."""
        row = self.row_of.get(end.request_id)
        if row is None:
            return
        for group, num_blocks in enumerate(end.num_blocks):
            num_held = self._num_blocks[group][row]
            if num_blocks < num_held:
                self.block_tables[group, row, num_blocks:num_held] = -1
                self._num_blocks[group][row] = num_blocks
                if block_map is not None:
                    block_map.shorten(group, row, num_blocks)

    def keep_path(self, scheduled: ScheduledRequest, path: int) -> None:
        """Sets the blocks of a row to those of the accepted path of its draft tree; the blocks of
        path 0 are already set. Draft trees require the paged layout, in which the index is the
        block id.
        """
        row = self.row_of[scheduled.request_id]
        for group, index, block_id in scheduled.leaf_blocks[path - 1] if path else ():
            self.block_tables[group, row, index] = block_id

    def num_placed_tokens(self, row: int) -> int:
        """Returns the number of tokens for which a row has blocks in every group; the block of a
        state is enough for any number.
        """
        counts = enumerate(self._num_blocks)
        return BLOCK_SIZE * min(count[row] for group, count in counts if group not in self._states)

    def indices(self, scheduled: Sequence[ScheduledRequest]) -> NDArray[np.intp]:
        """Returns the rows of a step's requests, `[R]`."""
        return np.array([self.row_of[entry.request_id] for entry in scheduled], np.intp)

    def write_drafts(self, row: int, num_known: int, draft_ids: Sequence[int]) -> None:
        """Writes draft tokens after a row's known tokens; sampled tokens overwrite them."""
        self.token_ids[row, num_known : num_known + len(draft_ids)] = draft_ids
        self.grammars.add_drafts(row, draft_ids)

    def get_end_tokens(self, rows: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the index at which each row's end tokens begin, `[R+1]`, and the end tokens of
        `rows [R]`.
        """
        ids = [self._end_token_ids[row] for row in rows.tolist()]
        starts = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(list(map(len, ids)), out=starts[1:])
        return starts, np.concatenate(ids)

    def draft_forced(self, row: int) -> list[int]:
        """Returns draft tokens for the text forced by a row's grammar; [] if forced text is not
        drafted.
        """
        return self.grammars.likely_tokens(row)[:MAX_FORCED] if self._drafts_forced else []

    def append_forced(self, row: int, num_tokens: int) -> list[int]:
        """Appends the tokens that a row's grammar forces after its `num_tokens` known tokens;
        returns them.
        """
        forced: list[int] = []
        max_tokens = min(MAX_FORCED, self.token_ids.shape[1] - 1 - num_tokens)
        while len(forced) < max_tokens:
            token_id = self.grammars.only_token(row)
            end = num_tokens + len(forced)
            if token_id is None or not self.sampling.may_append(row, token_id, end):
                break
            self.token_ids[row, end] = token_id
            self.sampling.accept_token(row, token_id)
            self.grammars.accept_token(row, token_id)
            forced.append(token_id)
        return forced

    def write_tokens(self, request_id: str, start: int, token_ids: Sequence[int]) -> None:
        """Writes tokens that another pipeline stage sampled, if the request has a row."""
        row = self.row_of.get(request_id)
        if row is not None:
            self.token_ids[row, start : start + len(token_ids)] = token_ids

    def accept_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Updates the sampling and grammar states of rows by their sampled tokens."""
        for row, token_id in zip(rows, token_ids, strict=True):
            self.sampling.accept_token(row, token_id)
            self.grammars.accept_token(row, token_id)
