"""Importance of each input of a Program's matrices, used as weights of the rounding errors in 4-bit
packing.

A few channels of the residual stream are hundreds of times larger than the rest, which the weights
alone do not show. Before packing, the Program therefore runs once over random tokens, with the
weights of one op in memory at a time; no tokenizer or text is needed. Every load packs the same
bits, independent of the number of BLAS threads: computation is in float64, the seed is fixed and
results are powers of two. Source of activation-aware weighting: AWQ (Lin et al. 2023).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import LoadWeight
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.noise import philox
from octavo.executor.reference.backend import FORMULAS, ReferenceBackend
from octavo.executor.reference.kv_cache import make_kv_layout
from octavo.executor.reference.step import Floats, ReferenceStep
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Embedding, Linear, original_context
from octavo.program.program import Op, Program
from octavo.quant.blocks import StoredWeight

NUM_TOKENS = 64
"""Number of tokens in the run. SmolLM2's rise in perplexity is the same with 32 and with 256 (4.1%
to 4.4% on all of Opticks).
"""

SEED = 0
FLOOR = 1e-3
"""Lower bound on importance relative to the mean. SmolLM2's perplexity is the same with a tenth of
it and with ten times as much.
"""

SMALL_PRODUCT = 1 << 18
"""Maximum number of multiplications of a matmul that OpenBLAS computes in one thread."""

CHUNK_VALUES = 1 << 17
"""Number of values of a matrix converted to float64 at a time; they fit in the L2 cache."""


def input_powers(
    program: Program, load: LoadWeight, *, context_tokens: int
) -> dict[str, NDArray[np.float32]]:
    """Returns the mean square of each input of every matrix, `[in]` by weight name, rounded to
    powers of two.
    """
    num_tokens = min(NUM_TOKENS, context_tokens)
    token_ids = _random_tokens(num_tokens, program.vocab_size)
    return {
        name: _power_of_two(power) for name, power in mean_squares(program, load, token_ids).items()
    }


def _random_tokens(num_tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """Returns `[num_tokens]` uniform random ids, each from 53 bits of Philox."""
    x0, x1, _, _ = philox((SEED, 0), (np.arange(num_tokens), 0, 0, 0))
    u = ((x0 << np.uint64(21)) | (x1 >> np.uint64(11))) * 2.0**-53
    return (u * vocab_size).astype(np.int32)


def mean_squares(
    program: Program, load: LoadWeight, token_ids: NDArray[np.int32]
) -> dict[str, Floats]:
    """Returns the mean square of each input over one text. Uses the reference formulas, with
    matmuls of many rows at once.
    """
    groups = program.groups
    last_axis = max((op.axis for op in program.ops if isinstance(op, Embedding)), default=0)
    first = original_context(program).first_position(len(token_ids))
    batch = make_prompt_batch(token_ids, len(groups), num_axes=1 + last_axis, first_position=first)
    num_blocks = [batch.block_tables.shape[-1]] * len(groups)
    kv = ReferenceBackend().allocate([make_kv_layout(group) for group in groups], num_blocks)
    step = ReferenceStep(program, {}, batch, kv.groups, multiply=_multiply)
    unread = Counter(value.name for op in program.ops for value in op.inputs)
    last = [op for op in program.ops if isinstance(op, Linear | GroupedLinear)][-1]
    powers: dict[str, Floats] = {}
    with np.errstate(all="ignore"):
        for op in program.ops:
            if isinstance(op, Linear | GroupedLinear):
                power = np.square(step.get(op.x)).mean(axis=0)
                powers |= {weight.name: power for weight in op.weights if len(weight.shape) > 1}
            if op is last:
                break  # no later op needs the outputs
            _compute(op, step, load)
            _forget(op, step, unread)
    return powers


def _compute(op: Op, step: ReferenceStep, load: LoadWeight) -> None:
    if isinstance(op, Embedding) and op.ids is not None:
        step.weights = {op.table: _floats(load(op.table).rows(step.get(op.ids)))}
        op = replace(
            op, ids=None, by_position=True
        )  # one row for each position: the full table would take gigabytes
    else:
        step.weights = {weight: _floats(load(weight)) for weight in op.weights}
    for value, array in zip(op.outputs, FORMULAS[type(op)](op, step), strict=True):
        step.values[value.name] = array.astype(np.float64) if array.dtype == np.float32 else array


def _floats(packed: StoredWeight) -> NDArray:
    """Returns vectors in float64. Matrices stay in fp32 and are converted in use."""
    array = packed.dequantize()
    return array.astype(np.float64) if array.ndim == 1 else array


def _forget(op: Op, step: ReferenceStep, unread: Counter[str]) -> None:
    """Frees values that no later op reads."""
    unread.subtract(value.name for value in op.inputs)
    for value in op.inputs:
        if not unread[value.name]:
            step.values.pop(value.name, None)


def make_prompt_batch(
    token_ids: NDArray[np.int32],
    num_groups: int,
    *,
    num_axes: int,
    first_position: int = 0,
    start: int = 0,
) -> StepBatch:
    """Returns one request's prompt from token `start` on as one step that samples every row; all
    tokens are in segment 0.
    """
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    rows = np.arange(start, num_tokens, dtype=np.int32)
    return StepBatch(
        token_ids=token_ids[start:],
        key_indices=rows,
        positions=np.stack([rows + first_position, *[np.zeros_like(rows)] * (num_axes - 1)]),
        query_starts=np.array([0, len(rows)], np.int32),
        context_lens=np.full((num_groups, 1), num_tokens, np.int32),
        slots=np.tile(rows, (num_groups, 1)),
        block_tables=np.tile(np.arange(num_blocks, dtype=np.int32), (num_groups, 1, 1)),
        sample_rows=rows - start,
    )


def _multiply(matrix: NDArray, x: Floats) -> Floats:
    """Multiplies `matrix [out, in]` by the rows of `x [T, in]`; returns `[T, out]`."""
    num_outputs = max(8, CHUNK_VALUES // matrix.shape[1] // 8 * 8)
    parts = [
        _small_products(matrix[start : start + num_outputs], x)
        for start in range(0, len(matrix), num_outputs)
    ]
    return np.concatenate(parts, axis=1)


def _small_products(matrix: NDArray, x: Floats) -> Floats:
    """Multiplies in chunks of 8 outputs and few rows, so that BLAS starts no threads. Its waiting
    threads spin: next to busy processes, full matmuls took 10x as long on two cores; without
    threads, they take two thirds of the time.
    """
    num_outputs, num_inputs = matrix.shape
    wide = np.zeros((-(-num_outputs // 8) * 8, num_inputs))
    wide[:num_outputs] = matrix
    pieces = wide.reshape(-1, 8, num_inputs).transpose(0, 2, 1)
    num_rows = max(1, SMALL_PRODUCT // (8 * num_inputs))
    parts = [
        (x[start : start + num_rows] @ pieces).transpose(1, 0, 2)
        for start in range(0, len(x), num_rows)
    ]
    return np.concatenate(parts).reshape(len(x), -1)[:, :num_outputs]


def _power_of_two(power: Floats) -> NDArray[np.float32]:
    """Returns powers of two relative to the mean, at least `FLOOR`. Returns ones if all inputs are
    zero or some are NaN.
    """
    mean = power.mean()
    if not np.isfinite(mean) or mean == 0:
        return np.ones(len(power), np.float32)
    exponents: NDArray[np.float32] = np.rint(np.log2(np.maximum(power / mean, FLOOR))).astype(
        np.float32
    )
    return np.exp2(exponents)
