"""Batch invariance: a row's bits are independent of other rows, either through kernels with fixed
tiles or by computing each row in a separate step.

In the second case a step is split into rows and the results are joined. Shapes then depend only on
the row's own request, and PyTorch gives the same bits for the same shapes. Requires causal
Programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.executor.batch import KvCopies, LastTokens, SampleResult, StepBatch, StepOutput
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.attention.call import AttentionKernels
from octavo.executor.torch.kernels import Kernels
from octavo.program import ops
from octavo.program.mixers import SelectiveScan
from octavo.program.program import Program


def kernels_suffice(
    program: Program, kernels: Kernels, attention: AttentionKernels, device: torch.device
) -> bool:
    """Returns whether complete steps are invariant: all reductions use kernels with fixed tiles and
    other ops are elementwise.

    False on a CPU, whose loops treat the tail of a vector differently, and for latent attention and
    recurrences, whose matmuls and sums are PyTorch's.
    """
    fixed = kernels.is_invariant and attention.is_invariant and device.type == "cuda"
    return fixed and not any(isinstance(op, ops.MlaAttention | SelectiveScan) for op in program.ops)


@dataclass(frozen=True, slots=True)
class RowStep:
    batch: StepBatch
    sample: int
    """Index among the step's sampled rows; -1 if it is not sampled."""


def rows_alone(batch: StepBatch) -> Iterator[RowStep]:
    """Yields the rows of a step in order, so that each row finds its keys.

    A row that is sampled twice is computed twice; both write the same KV.
    """
    owners = np.repeat(np.arange(len(batch.query_starts) - 1), np.diff(batch.query_starts)).tolist()
    for row, request in enumerate(owners, start=int(batch.query_starts[0])):
        alone = _alone(batch, row, request)
        samples = np.flatnonzero(batch.sample_rows == row).tolist()
        if not samples:
            yield RowStep(alone, -1)
        for sample in samples:
            sampling = None if batch.sampling is None else batch.sampling.part(sample, sample + 1)
            last_tokens = _last_tokens(batch, row, slice(sample, sample + 1))
            yield RowStep(
                replace(
                    alone,
                    sample_rows=np.zeros(1, np.int32),
                    sampling=sampling,
                    last_tokens=last_tokens,
                ),
                sample,
            )


def _alone(batch: StepBatch, row: int, request: int) -> StepBatch:
    """Returns the step of one row.

    In cache groups that it writes, the row sees keys up to its own; in other groups, all keys.
    """
    own = batch.slots[:, row : row + 1] >= 0
    context = batch.context_lens[:, request : request + 1]
    limit = batch.key_indices[row] + 1 if batch.limits is None else batch.limits[row]
    context = np.where(own, np.minimum(context, limit), context).astype(np.int32)
    return StepBatch(
        token_ids=batch.token_ids[row : row + 1],
        key_indices=batch.key_indices[row : row + 1],
        positions=batch.positions[:, row : row + 1],
        query_starts=np.array([0, 1], np.int32),
        context_lens=context,
        slots=batch.slots[:, row : row + 1],
        block_tables=batch.block_tables[
            :, request : request + 1, : -(-int(context.max(initial=1)) // BLOCK_SIZE)
        ],
        sample_rows=np.zeros(0, np.int32),
        hidden=None if batch.hidden is None else batch.hidden[row : row + 1],
        input_rows=batch.input_rows,
        input_row_indices=None
        if batch.input_row_indices is None
        else batch.input_row_indices[row : row + 1],
        limits=None if batch.limits is None else batch.limits[row : row + 1],
        adapter_rows=None if batch.adapter_rows is None else batch.adapter_rows[row : row + 1],
        last_tokens=_last_tokens(batch, row, slice(0, 0)),
        copies=None if batch.copies is None else _copies(batch.copies, row),
    )


def _copies(copies: KvCopies, row: int) -> KvCopies:
    first, end = (int(start) for start in copies.starts[row : row + 2])
    return KvCopies(np.array([0, end - first], np.int32), copies.slots[:, first:end])


def _last_tokens(batch: StepBatch, row: int, samples: slice) -> LastTokens | None:
    last = batch.last_tokens
    return None if last is None else LastTokens(last.sources[row : row + 1], last.targets[samples])


def joined(batch: StepBatch, outputs: Sequence[StepOutput]) -> StepOutput:
    """Joins the outputs of sampled rows into one step's output."""
    if batch.sampling is None:
        names = outputs[0].arrays if outputs else {}
        return StepOutput(
            arrays={
                name: np.concatenate([output.arrays[name] for output in outputs]) for name in names
            }
        )
    results = [output.samples for output in outputs if output.samples is not None]
    count = len(batch.sample_rows)
    whole = SampleResult(np.zeros(count, np.int32), np.zeros(count, np.bool_))
    widths = [result.top_ids.shape[1] for result in results if result.top_ids is not None]
    if widths:
        whole.logprobs, whole.ranks = np.zeros(count, np.float32), np.zeros(count, np.int32)
        whole.top_ids = np.zeros((count, max(widths)), np.int32)
        whole.top_logprobs = np.zeros((count, max(widths)), np.float32)
    if any(result.surprises is not None for result in results):
        whole.surprises = np.zeros(count, np.float32)
    for index, result in enumerate(results):
        if whole.surprises is not None and result.surprises is not None:
            whole.surprises[index] = result.surprises[0]
        whole.token_ids[index], whole.failed[index] = result.token_ids[0], result.failed[0]
        if result.logprobs is not None:
            _take_logprobs(whole, index, result)
    return StepOutput(samples=whole)


def _take_logprobs(whole: SampleResult, index: int, result: SampleResult) -> None:
    assert (
        whole.logprobs is not None
        and whole.ranks is not None
        and whole.top_ids is not None
        and whole.top_logprobs is not None
    )
    assert (
        result.logprobs is not None
        and result.ranks is not None
        and result.top_ids is not None
        and result.top_logprobs is not None
    )
    whole.logprobs[index], whole.ranks[index] = result.logprobs[0], result.ranks[0]
    width = result.top_ids.shape[1]
    whole.top_ids[index, :width] = result.top_ids[0]
    whole.top_logprobs[index, :width] = result.top_logprobs[0]
