"""Samples a token of each row after min_p, top_k and top_p, without sorting: the cut-off value is
found by search.

    program s  one row:  z [V], top, temperature  ->  d = (z - top) / temperature  ->  tokens[s]

1. min_p: tokens with exp(d) >= min_p are candidates, or those with exp(d) > 0.
2. top_k: the largest value `cut` such that at least k candidates have d >= cut. Those above it are
   kept, and of those equal to it the first ones by id, until there are k.
3. top_p: the same with weights exp(d) instead of counts, among the remaining tokens.
4. Among the remaining tokens, the one with the largest d + g, the lowest id among equals.

Rows without cut-offs take one pass over z, for the last step; d and exp(d) are never stored. A
search (`_cut_at`) maintains two token values: a lower bound of the cut-off and an upper bound. Each
pass over the row tests PIVOTS values between them: the weight of all tokens at or above the value,
and the nearest token values above and below it. The search ends when both bounds are equal. Every
pass moves a bound past a token; most divide the distance by PIVOTS. Ties need no additional passes.
Weights are computed only in tiles that contain a token at or above the lower bound. All sums are in
fp64 over tiles in order: a row's token is the same in any batch. The summation order differs from
the reference's, which shifts cut-offs by about 1e-16 of the total.

Noise is computed only if it can matter (`_lead`): not for tokens far below the best score, and
logarithms only for tiles in which some token may have the best score. Specification:
`executor/filters.py` and `executor/noise.py`. Reference: `plain.PlainKernels.pick`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.batch import SAMPLING_RECORD
from octavo.executor.noise import SAMPLE_PURPOSE
from octavo.executor.torch.sampler_ops import get_word_index
from octavo.executor.torch.triton.tuning import tuned

WORDS = tl.constexpr(SAMPLING_RECORD.itemsize // 4)
SEED = tl.constexpr(get_word_index("seed"))
POSITION = tl.constexpr(get_word_index("position"))
SAMPLE_INDEX = tl.constexpr(get_word_index("sample_index"))
TOP_K = tl.constexpr(get_word_index("top_k"))
TOP_P = tl.constexpr(get_word_index("top_p"))
MIN_P = tl.constexpr(get_word_index("min_p"))
PURPOSE = tl.constexpr(SAMPLE_PURPOSE)

NO_WEIGHT = tl.constexpr(-745.1332191019412)
"""Largest d whose exp is 0 in fp64."""
LARGEST_NOISE = tl.constexpr(22.88)
"""Upper bound of g, at u = 1 - 2^-33."""
OCTAVE = tl.constexpr(float(1 << 23))
"""Increase of a float's bits, read as an integer, from one power of two to the next."""
LN2 = tl.constexpr(0.6931471805599453)


def pick(
    z: Tensor, top: Tensor, temperature: Tensor, records: Tensor, *, cuts: bool, device: str
) -> Tensor:
    """Returns a token of each row, `[S] int64`, as specified by `kernels.Kernels.pick`."""
    num_rows, vocab_size = z.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=z.device)
    if num_rows:
        launch = tuned("pick", device, vocab_size=vocab_size)
        launch["BLOCK"] = min(launch["BLOCK"], max(4, triton.next_power_of_2(vocab_size)))
        pick_kernel[(num_rows,)](
            z.contiguous(),
            top,
            temperature,
            records.contiguous(),
            tokens,
            vocab_size,
            CUTS=cuts,
            **launch,
        )
    return tokens


class Row(NamedTuple):
    """Logits of one row, and what turns them into distances d."""

    z: Any
    top: Any
    temperature: Any
    vocab_size: Any


@triton.jit
def pick_kernel(
    z,
    tops,
    temperatures,
    records,
    tokens,
    vocab_size,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + row)
    # Rows without tokens, and with infinities or NaN, have no other.
    if (top > float("-inf")) & (top < float("inf")):
        temperature = tl.load(temperatures + row)
        one = Row(z + row * vocab_size, top, temperature, vocab_size)
        records += row * WORDS
        min_p = tl.load(records + MIN_P).to(tl.float32, bitcast=True)
        cut = tl.full([], NO_WEIGHT, tl.float64)
        taken = tl.full([], 0, tl.int32) + vocab_size
        if CUTS:
            low, high, count = _get_range(one, min_p, BLOCK)
            top_k = tl.load(records + TOP_K)
            top_p = tl.load(records + TOP_P).to(tl.float32, bitcast=True)
            cut, taken = _cut(one, low, high, count, top_k, top_p, BLOCK, PIVOTS)
        elif min_p > 0:
            cut, _, taken = _get_range(one, min_p, BLOCK)
        tl.store(tokens + row, _lead(one, records, cut, taken, BLOCK))


@triton.jit
def _distances(row, at):
    """Returns d of the tokens `at`; -inf beyond the vocabulary."""
    z = tl.load(row.z + at, mask=at < row.vocab_size, other=float("-inf"))
    if z.dtype != tl.float64:
        z = z.to(tl.float32).to(tl.float64)
    return (z - row.top) / row.temperature


@triton.jit
def _cut(row, low, high, count, top_k, top_p, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Returns the smallest kept d, and how many tokens equal to it are kept."""
    cut = low
    counts = (top_k > 0) & (top_k < count)
    if counts:
        cut = _cut_at(row, low, high, top_k.to(tl.float64), True, BLOCK, PIVOTS)
    above, num_above, taken, weight = _around(row, cut, BLOCK)
    if counts:
        taken = top_k - num_above
    if top_p < 1.0:
        target = top_p.to(tl.float64) * (above + taken.to(tl.float64) * weight)
        found = _cut_at(row, cut, high, target, False, BLOCK, PIVOTS)
        if found > cut:
            above, num_above, taken, weight = _around(row, found, BLOCK)
            cut = found
        missing = tl.maximum(tl.ceil((target - above) / weight), 1.0)
        taken = tl.minimum(missing, taken.to(tl.float64)).to(tl.int32)
    return cut, taken


@triton.jit
def _cut_at(
    row, low, high, target, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """Returns the largest d such that tokens at or above it weigh (or count) at least `target`,
    given that the tokens at or above `low`, all of them candidates, do.
    """
    lane, pivot = tl.arange(0, BLOCK), tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + (high - low) * ((pivot + 1).to(tl.float64) / PIVOTS)
        pivots = tl.where(pivot == PIVOTS - 1, high, pivots)
        reached = tl.zeros((BLOCK, PIVOTS), tl.float64)
        above = tl.full((BLOCK, PIVOTS), float("inf"), tl.float64)
        below = tl.full((BLOCK, PIVOTS), float("-inf"), tl.float64)
        for start in range(0, row.vocab_size, BLOCK):
            values = _distances(row, start + lane)
            if tl.max(values, 0) >= low:
                mass = tl.full((BLOCK,), 1.0, tl.float64)
                if not BY_COUNT:
                    mass = tl.exp(values)
                column = tl.where(values >= low, values, float("-inf"))[:, None]
                reaches = column >= pivots[None, :]
                reached += tl.where(reaches, mass[:, None], 0.0)
                above = tl.minimum(above, tl.where(reaches, column, float("inf")))
                below = tl.maximum(below, tl.where(reaches, float("-inf"), column))
        enough = tl.sum(reached, 0) >= target
        low = tl.maximum(low, tl.max(tl.where(enough, tl.min(above, 0), float("-inf")), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, float("inf"), tl.max(below, 0)), 0))
    return low


@triton.jit
def _get_range(row, min_p, BLOCK: tl.constexpr):
    """Returns the smallest and largest d among candidate tokens, and their number."""
    lane = tl.arange(0, BLOCK)
    lows, highs = (
        tl.full((BLOCK,), float("inf"), tl.float64),
        tl.full((BLOCK,), float("-inf"), tl.float64),
    )
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, row.vocab_size, BLOCK):
        values = _distances(row, start + lane)
        kept = values > NO_WEIGHT
        if min_p > 0:
            kept &= tl.exp(values) >= min_p.to(tl.float64)
        lows = tl.minimum(lows, tl.where(kept, values, float("inf")))
        highs = tl.maximum(highs, tl.where(kept, values, float("-inf")))
        counts += kept.to(tl.int32)
    return tl.min(lows, 0), tl.max(highs, 0), tl.sum(counts, 0)


@triton.jit
def _around(row, cut, BLOCK: tl.constexpr):
    """Returns the total weight and number of tokens above `cut`, the number equal to it, and the
    weight of one of these.
    """
    lane = tl.arange(0, BLOCK)
    above, num_above = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)
    num_equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, row.vocab_size, BLOCK):
        values = _distances(row, start + lane)
        if tl.max(values, 0) >= cut:
            above += tl.where(values > cut, tl.exp(values), 0.0)
            num_above += (values > cut).to(tl.int32)
            num_equal += (values == cut).to(tl.int32)
    return tl.sum(above, 0), tl.sum(num_above, 0), tl.sum(num_equal, 0), tl.exp(cut)


@triton.jit
def _lead(row, records, cut, taken, BLOCK: tl.constexpr):
    """Returns the kept token with the largest d + g; kept are all above `cut` and the first `taken`
    equal to it.
    """
    lane = tl.arange(0, BLOCK)
    best, drawn = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    ties = tl.full([], 0, tl.int32)
    for start in range(0, row.vocab_size, BLOCK):
        at = start + lane
        values = _distances(row, at)
        equal = (values == cut).to(tl.int32)
        first = (equal > 0) & (ties + tl.cumsum(equal, 0) <= taken)
        values = tl.where((values > cut) | first, values, float("-inf"))
        ties += tl.sum(equal, 0)
        if tl.max(values, 0) > best - LARGEST_NOISE:
            words = _words(records, start, BLOCK)
            if tl.max(_may_lead(values, words, best).to(tl.int32), 0) > 0:
                score = values + _gumbel(words)
                top = tl.max(score, 0)
                if top > best:
                    best = top
                    drawn = tl.min(tl.where(score == top, at, row.vocab_size), 0)
    return drawn.to(tl.int64)


@triton.jit
def _words(records, start, BLOCK: tl.constexpr):
    """Returns the random words of tokens start..start+BLOCK-1; both are multiples of 4."""
    low = tl.load(records + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(records + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    quads = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    none = tl.zeros_like(quads)
    position = none + tl.load(records + POSITION).to(tl.uint32, bitcast=True)
    sample = none + tl.load(records + SAMPLE_INDEX).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox((high << 32) | low, position, sample, quads, none + PURPOSE)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _may_lead(values, words, best):
    """Returns whether d + g may exceed `best`; never false if it does.

    g > x only if 1 - u < e^-x. A float's bits, read as a number, approximate its log2 from below by
    at most 0.09: two conversions replace two logarithms.
    """
    rest = ((words ^ 0xFFFFFFFF) >> 1).to(tl.int32).to(tl.float32)
    logarithm = rest.to(tl.int32, bitcast=True).to(tl.float32)
    # `rest` is (1 - u) * 2^31, rounded down; exponents count from -127. The last term is more than
    # what rounding takes.
    bound = (values - best) / LN2 + (31 + 127 + 0.001)
    return logarithm < (bound * OCTAVE).to(tl.float32)


@triton.jit
def _gumbel(words):
    """Returns g in fp64, which represents u exactly, so no logarithm of 1 - u is needed."""
    u = (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(u))
