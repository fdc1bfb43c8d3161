"""A step of one Program: its arrays, gathered from the permanent rows of its requests, and the base
class of the runners that prepare, run and launch it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import EncoderInput, RowResult, ScheduledRequest
from octavo.executor.base import Computing, Runnable
from octavo.executor.batch import StepBatch, StepOutput
from octavo.executor.kv import BLOCK_SIZE, KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.sampling.sample_verifier import SampleVerifier

NO_ROWS = np.zeros(0, np.intp)
NO_SAMPLES = np.zeros(0, np.int32)


@dataclass(slots=True)
class ModelInput(StepBatch):
    """One step of a Program. Its requests and `D` samples stay on the host; the executor reads the
    arrays of `StepBatch`.

    `sample_rows` contains first the rows of the samples, then the prompt tokens to score
    (`prompt_targets`), then further tokens whose logprobs samples report (`logprob_targets`).
    """

    runner: ProgramRunner = field(init=False, repr=False)
    """Runner that prepared this step."""
    scheduled: Sequence[ScheduledRequest] = ()
    rows: NDArray[np.intp] = field(default_factory=lambda: NO_ROWS)
    """Permanent row of each of `scheduled`, then of each further path of draft trees, `[R]`."""
    sample_owners: list[int] = field(default_factory=list)
    """Index in `scheduled` of each sample's request, `[D]`; one more sample per draft token."""
    owner_rows: NDArray[np.intp] = field(default_factory=lambda: NO_ROWS)
    """Permanent row of each sample, `[D]`."""
    sample_ends: NDArray[np.int32] = field(default_factory=lambda: NO_SAMPLES)
    """Number of tokens before each sample, `[D]`."""
    has_drafts: bool = False
    prompt_targets: Sequence[tuple[int, int, int]] = ()
    """Prompt tokens to score: (index in `scheduled`, first token, end)."""
    logprob_targets: Sequence[tuple[int, NDArray[np.int32]]] = ()
    """Further tokens whose logprobs a sample reports: (index of the sample, token ids)."""
    verifier: SampleVerifier | None = None
    """Verifies the sampled tokens; None if none are to be verified."""


class ProgramRunner(ABC):
    """Runs one Program's part of a step, using the KV of the requests that have a row."""

    def __init__(self, runnable: Runnable, kv: KvCache, rows: InputBatch) -> None:
        self.runnable = runnable
        self._kv = kv
        self._rows = rows

    @abstractmethod
    def prepare_inputs(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the first of `num_steps` steps, as several inputs if the backend cannot run all
        rows at once. A step may be prepared repeatedly.
        """

    @abstractmethod
    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        """Returns the results of computed requests, in order, and appends their sampled tokens."""

    def run(self, model_input: ModelInput) -> list[RowResult]:
        output = self.runnable.run(model_input, self._kv, model_input.verifier)
        return self.results(model_input, output)

    def launch(self, model_input: ModelInput, *, all_known: bool = False) -> Computing:
        """Starts a step without waiting for it. With `all_known`, the host already has the tokens
        of earlier steps.
        """
        return self.runnable.launch(model_input, self._kv)

    def run_again(self, model_input: ModelInput) -> list[RowResult]:
        """Launches a step after all earlier steps have returned, and waits for its results."""
        computing = self.launch(model_input, all_known=True)
        return self.results(model_input, computing.result())

    def decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]] | None:
        """Returns an iterator that computes up to `num_steps` decode steps, one each time it is
        advanced. Returns None if these rows must be computed one step at a time.
        """
        return None

    def join(self) -> None:
        """Computes a step without rows, in which the experts compute rows of other engines."""
        self.runnable.join(self._kv)


def gather(
    rows: InputBatch,
    row_ids: NDArray[np.intp],
    ends: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    num_steps: int = 1,
) -> ModelInput:
    """Returns the first of `num_steps` steps, without samples; block tables are long enough for the
    last step.

    Takes each request's permanent row `[R]`, its number of tokens at the end of the step `[R]`, and
    the index of its first token within the step `[R+1]`.
    """
    counts = query_starts[1:] - query_starts[:-1]
    owners = row_ids.repeat(counts)
    key_indices = np.arange(query_starts[-1], dtype=np.int32)
    key_indices += (ends - query_starts[1:]).repeat(counts)
    tables, adapters = rows.block_tables, rows.adapters[row_ids]
    slots = tables[:, owners, key_indices // BLOCK_SIZE] * BLOCK_SIZE + key_indices % BLOCK_SIZE
    num_blocks = -(-(int(ends.max()) + num_steps - 1) // BLOCK_SIZE)
    context_lens = ends[None].repeat(len(tables), axis=0)
    if len(rows.input_groups):
        # Cross-attention reads the encoder input, whatever the decoder's length.
        input_lens = rows.input_lens[row_ids]
        slots[rows.input_groups] = -1
        context_lens[rows.input_groups] = input_lens
        num_blocks = max(num_blocks, -(-int(input_lens.max()) // BLOCK_SIZE))
    model_input = ModelInput(
        token_ids=rows.token_ids[owners, key_indices],
        key_indices=key_indices,
        positions=(key_indices + rows.first_positions[owners])[None].repeat(rows.num_axes, axis=0),
        query_starts=query_starts,
        context_lens=context_lens,
        slots=np.ascontiguousarray(slots),
        block_tables=np.ascontiguousarray(tables[:, row_ids, :num_blocks]),
        sample_rows=NO_SAMPLES,
        sparse_from=rows.num_prompt_tokens[row_ids],
        adapter_rows=adapters.repeat(counts) if adapters.max(initial=-1) >= 0 else None,
        rows=row_ids,
        owner_rows=NO_ROWS,
        sample_ends=NO_SAMPLES,
    )
    unread = rows.num_unread[row_ids]
    if unread.any():
        _close_holes(model_input, unread)
    return model_input


def gather_scheduled(rows: InputBatch, scheduled: Sequence[ScheduledRequest]) -> ModelInput:
    """Returns a step of requests without draft tokens, and without samples."""
    ends = np.array([row.start + row.num_tokens for row in scheduled], np.int32)
    starts = np.cumsum([0, *(row.num_tokens for row in scheduled)], dtype=np.int32)
    model_input = gather(rows, rows.indices(scheduled), ends, starts)
    model_input.scheduled = scheduled
    return model_input


def _close_holes(model_input: ModelInput, unread: NDArray[np.int32]) -> None:
    """Removes the holes from block tables in which `unread [R]` blocks are missing. Keys contain
    their rotary positions, so token indices need to count only the blocks that are read.
    """
    counts = model_input.query_starts[1:] - model_input.query_starts[:-1]
    for index in np.flatnonzero(unread):
        table = model_input.block_tables[:, index]
        read = table[:, table[0] != -1]
        table[:] = -1
        table[:, : read.shape[1]] = read
    num_tokens = unread * BLOCK_SIZE
    model_input.key_indices -= num_tokens.repeat(counts)
    model_input.context_lens -= num_tokens
    if model_input.sparse_from is not None:
        model_input.sparse_from = model_input.sparse_from - num_tokens


def gather_inputs(rows: InputBatch, owners: NDArray[np.intp]) -> ModelInput:
    """Returns the step of an encoder over the complete inputs of the permanent rows `owners
    [R]`.
    """
    lens = rows.input_lens[owners]
    query_starts = np.zeros(len(owners) + 1, np.int32)
    np.cumsum(lens, out=query_starts[1:])
    key_indices = np.arange(query_starts[-1], dtype=np.int32) - query_starts[:-1].repeat(lens)
    tables, groups = rows.block_tables, rows.input_groups
    block_ids = tables[groups][:, owners.repeat(lens), key_indices // BLOCK_SIZE]
    slots = np.full((len(tables), len(key_indices)), -1, np.int32)
    slots[groups] = block_ids * BLOCK_SIZE + key_indices % BLOCK_SIZE
    context_lens = np.zeros((len(tables), len(owners)), np.int32)
    context_lens[groups] = lens
    num_blocks = -(-int(lens.max()) // BLOCK_SIZE)
    inputs = [rows.inputs[row] for row in owners.tolist()]
    # Rows of numbers replace embeddings; their token id is 0.
    ids = [
        token_id
        for encoder_input in inputs
        for token_id in encoder_input.token_ids or [0] * encoder_input.num_rows
    ]
    input_rows = _join_rows(inputs)
    return ModelInput(
        token_ids=np.array(ids, np.int32),
        key_indices=key_indices,
        positions=key_indices[None],
        query_starts=query_starts,
        context_lens=context_lens,
        slots=slots,
        block_tables=np.ascontiguousarray(tables[:, owners, :num_blocks]),
        sample_rows=NO_SAMPLES,
        input_rows=input_rows,
        input_row_indices=None
        if input_rows is None
        else np.arange(len(key_indices), dtype=np.int32),
        rows=owners,
    )


def _join_rows(inputs: Sequence[EncoderInput]) -> NDArray[np.float32] | None:
    """Concatenates encoder inputs that are rows of numbers, `[T, W]`. Returns None if all inputs
    are texts.
    """
    arrays = [
        np.frombuffer(encoder_input.rows, "<f4").reshape(encoder_input.num_rows, -1)
        for encoder_input in inputs
        if encoder_input.rows
    ]
    return np.concatenate(arrays).astype(np.float32) if arrays else None
