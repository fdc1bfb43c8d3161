"""Draws a token of each row after cutting to top_k and top_p, without sorting: the value at which a
row is cut is searched for.

    program s  one row:  z, weights [V] fp64 (0 for tokens that may not be drawn)  ->  tokens[s]

1. top_k: the largest value `cut` such that at least k tokens have z >= cut. Those above it are in;
   of those that equal it the first by id, as many as are missing.
2. top_p: the same with weights in place of counts, among the tokens left.
3. The tokens left are walked by rising id up to the one whose running sum exceeds point * sum.

A search (`_cut_at`) holds two values of tokens, one known to be low enough and the largest that may
be the answer, and asks in each pass over the row for PIVOTS values between them: how much weighs
what is at or above, which token's value is next above, which next below. It ends when the two are
one; every pass moves one of them past a token, and most divide the distance by PIVOTS. Ties need no
more passes. All sums are in fp64 over tiles in order: a row's token is the same in any company.
They are added in another order than the reference's, which moves borders by some 1e-16 of the
whole. Source of the text: `backends/sampling.py`, steps 5 and 6. Reference:
`plain.PlainKernels.pick`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.plain import Cuts
from octavo.backends.torch.triton.tuning import tuned


def pick(z: Tensor, weights: Tensor, points: Tensor, cuts: Cuts, device: str) -> Tensor:
    """`[S] int64`."""
    num_rows, vocab_size = z.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=z.device)
    if num_rows:
        launch = tuned("pick", device, vocab_size=vocab_size)
        launch["BLOCK"] = min(launch["BLOCK"], triton.next_power_of_2(vocab_size))
        _pick_kernel[(num_rows,)](
            z.contiguous(),
            weights.contiguous(),
            points,
            cuts.top_ks,
            cuts.top_ps,
            tokens,
            vocab_size,
            **launch,
        )
    return tokens


@triton.jit
def _pick_kernel(
    z,
    weights,
    points,
    top_ks,
    top_ps,
    tokens,
    vocab_size,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z += row * vocab_size
    weights += row * vocab_size
    low, high, count = _ends(z, weights, vocab_size, BLOCK)
    if count > 0:
        cut, taken = low, count
        if top_ks is not None:
            cut, taken = _cut(
                z,
                weights,
                vocab_size,
                low,
                high,
                count,
                tl.load(top_ks + row),
                tl.load(top_ps + row),
                BLOCK,
                PIVOTS,
            )
        nowhere = tl.full([], float("inf"), tl.float64)
        total, last, drawn = _walk(z, weights, vocab_size, cut, taken, nowhere, BLOCK)
        total, last, drawn = _walk(
            z, weights, vocab_size, cut, taken, tl.load(points + row) * total, BLOCK
        )
        tl.store(tokens + row, tl.minimum(drawn, last))


@triton.jit
def _cut(
    z,
    weights,
    vocab_size,
    low,
    high,
    count,
    top_k,
    top_p,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The least z that is left, and how many tokens of just that z are."""
    cut = low
    if (top_k > 0) & (top_k < count):
        cut = _cut_at(z, weights, vocab_size, low, high, top_k.to(tl.float64), True, BLOCK, PIVOTS)
    above, num_above, num_equal, weight = _around(z, weights, vocab_size, cut, BLOCK)
    taken = num_equal
    if (top_k > 0) & (top_k < count):
        taken = top_k - num_above
    if top_p < 1.0:
        target = top_p.to(tl.float64) * (above + taken.to(tl.float64) * weight)
        found = _cut_at(z, weights, vocab_size, cut, high, target, False, BLOCK, PIVOTS)
        if found > cut:
            above, num_above, taken, weight = _around(z, weights, vocab_size, found, BLOCK)
            cut = found
        missing = tl.maximum(tl.ceil((target - above) / weight), 1.0)
        taken = tl.minimum(missing, taken.to(tl.float64)).to(tl.int32)
    return cut, taken


@triton.jit
def _cut_at(
    z,
    weights,
    vocab_size,
    low,
    high,
    target,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The largest z for which tokens at or above it weigh (or count) at least `target`; at `low`
    they are known to.
    """
    lane, place = tl.arange(0, BLOCK), tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + (high - low) * ((place + 1).to(tl.float64) / PIVOTS)
        pivots = tl.where(place == PIVOTS - 1, high, pivots)
        reached = tl.zeros((BLOCK, PIVOTS), tl.float64)
        above = tl.full((BLOCK, PIVOTS), float("inf"), tl.float64)
        below = tl.full((BLOCK, PIVOTS), float("-inf"), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            at = start + lane
            values = tl.load(z + at, mask=at < vocab_size, other=0.0)[:, None]
            mass = tl.load(weights + at, mask=at < vocab_size, other=0.0)[:, None]
            kept = mass > 0
            if BY_COUNT:
                mass = kept.to(tl.float64)
            reaches = values >= pivots[None, :]
            reached += tl.where(reaches, mass, 0.0)
            above = tl.minimum(above, tl.where(kept & reaches, values, float("inf")))
            below = tl.maximum(
                below, tl.where(kept & (values < pivots[None, :]), values, float("-inf"))
            )
        enough = tl.sum(reached, 0) >= target
        low = tl.maximum(low, tl.max(tl.where(enough, tl.min(above, 0), float("-inf")), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, float("inf"), tl.max(below, 0)), 0))
    return low


@triton.jit
def _ends(z, weights, vocab_size, BLOCK: tl.constexpr):
    """The least and the largest z of tokens that may be drawn, and how many there are."""
    lane = tl.arange(0, BLOCK)
    lows, highs = (
        tl.full((BLOCK,), float("inf"), tl.float64),
        tl.full((BLOCK,), float("-inf"), tl.float64),
    )
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + lane
        values = tl.load(z + at, mask=at < vocab_size, other=0.0)
        kept = tl.load(weights + at, mask=at < vocab_size, other=0.0) > 0
        lows = tl.minimum(lows, tl.where(kept, values, float("inf")))
        highs = tl.maximum(highs, tl.where(kept, values, float("-inf")))
        counts += kept.to(tl.int32)
    return tl.min(lows, 0), tl.max(highs, 0), tl.sum(counts, 0)


@triton.jit
def _around(z, weights, vocab_size, cut, BLOCK: tl.constexpr):
    """What tokens above `cut` weigh together and how many they are, how many equal it, and what one
    of these weighs.
    """
    lane = tl.arange(0, BLOCK)
    above, equal_weight = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    num_above, num_equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + lane
        values = tl.load(z + at, mask=at < vocab_size, other=0.0)
        mass = tl.load(weights + at, mask=at < vocab_size, other=0.0)
        over, equal = (mass > 0) & (values > cut), (mass > 0) & (values == cut)
        above += tl.where(over, mass, 0.0)
        equal_weight = tl.maximum(equal_weight, tl.where(equal, mass, 0.0))
        num_above += over.to(tl.int32)
        num_equal += equal.to(tl.int32)
    return tl.sum(above, 0), tl.sum(num_above, 0), tl.sum(num_equal, 0), tl.max(equal_weight, 0)


@triton.jit
def _walk(z, weights, vocab_size, cut, taken, point, BLOCK: tl.constexpr):
    """The sum over tokens that are left, the last of them, and the first whose running sum exceeds
    `point` (V where none does).
    """
    lane = tl.arange(0, BLOCK)
    total, ties = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
    last, drawn = tl.full([], 0, tl.int32), tl.full([], vocab_size, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + lane
        values = tl.load(z + at, mask=at < vocab_size, other=0.0)
        mass = tl.load(weights + at, mask=at < vocab_size, other=0.0)
        equal = ((mass > 0) & (values == cut)).to(tl.int32)
        first = (equal > 0) & (ties + tl.cumsum(equal, 0) <= taken)
        kept = (mass > 0) & ((values > cut) | first)
        mass = tl.where(kept, mass, 0.0)
        sums = total + tl.cumsum(mass, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where(kept & (sums > point), at, vocab_size), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, at, 0), 0))
        total += tl.sum(mass, 0)
        ties += tl.sum(equal, 0)
    return total, last, drawn
