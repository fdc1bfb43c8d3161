"""Laws that the draws of every backend keep: the probabilities of each sampler, draws under a mask,
proofs of cuts, ranks of ties.

Backends differ in the `sample(logits, batch)` that a test passes in. Batches come from
`sampling_cases.py`, where results of random ones are compared with the reference's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor import sampling
from octavo.executor.batch import SamplingBatch
from tests.support.sampling_cases import Entries, Sample, batch_for, rng

SHARES = np.array([0.05, 0.35, 0.08, 0.25, 0.1, 0.15, 0.02])
"""Probabilities of a small vocabulary, in no order."""


@dataclass(frozen=True)
class Sampler:
    """One option, and the weights that it gives the tokens of `SHARES`."""

    weights: NDArray[np.float64]
    fields: dict[str, Any] = field(default_factory=dict)
    bias: Entries = ()
    history: Entries = ()
    mask: NDArray[np.bool_] | None = None

    def batch(self, count: int) -> SamplingBatch:
        """Returns `count` rows, each at another position unless the fields say otherwise."""
        return batch_for(
            count,
            len(SHARES),
            bias=[self.bias] * count,
            history=[self.history] * count,
            masks=None if self.mask is None else self.mask[None],
            **{
                "temperature": 1.0,
                "position": np.arange(count),
                "allowed_mask": -1 if self.mask is None else 0,
            }
            | self.fields,
        )


def _only(*tokens: int) -> NDArray[np.float64]:
    return np.where(np.isin(np.arange(len(SHARES)), tokens), SHARES, 0.0)


def _times(**factors: float) -> NDArray[np.float64]:
    changed = SHARES.copy()
    for name, factor in factors.items():
        changed[int(name[1:])] *= factor
    return changed


def _share(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return weights / weights.sum()


def dynamic_temperature(middle: float, reach: float, exponent: float) -> float:
    """Returns the temperature of `SHARES` by the definition."""
    entropy = -float((SHARES * np.log(SHARES)).sum()) / math.log(len(SHARES))
    low = middle - reach
    return low + 2 * reach * entropy**exponent


ODD = np.arange(len(SHARES)) % 2 == 1
SAMPLERS = {
    "plain": Sampler(SHARES),
    "temperature": Sampler(SHARES ** (1 / 0.7), {"temperature": 0.7}),
    "hot": Sampler(SHARES ** (1 / 1.8), {"temperature": 1.8}),
    "top_k": Sampler(_only(1, 3, 5), {"top_k": 3}),
    "top_p": Sampler(_only(1, 3, 5), {"top_p": 0.7}),
    "min_p": Sampler(_only(1, 3, 5, 4, 2), {"min_p": 0.2}),
    "all cuts": Sampler(_only(1, 3, 5), {"top_k": 4, "top_p": 0.85, "min_p": 0.2}),
    # All logits are below zero, so that a repetition penalty multiplies them.
    "repetition": Sampler(
        np.where([1, 0, 0, 1, 0, 0, 0], SHARES**1.5, SHARES),
        {"repetition_penalty": 1.5},
        history=[(0, 0), (3, 2)],
    ),
    "presence": Sampler(
        _times(t3=np.exp(-0.8), t5=np.exp(-0.8)),
        {"presence_penalty": 0.8},
        history=[(1, 0), (3, 2), (5, 1)],
    ),
    "frequency": Sampler(
        _times(t3=np.exp(-0.8), t5=np.exp(-0.4)),
        {"frequency_penalty": 0.4},
        history=[(1, 0), (3, 2), (5, 1)],
    ),
    "bias": Sampler(_times(t6=np.exp(2.0), t1=0.0), bias=[(6, 2.0), (1, -np.inf)]),
    "mask": Sampler(np.where(ODD, SHARES, 0.0), mask=ODD),
    "mask and top_k": Sampler(_only(1, 5), {"top_k": 2}, bias=[(3, -np.inf)], mask=ODD),
    "samples": Sampler(SHARES, {"position": 7, "sample_index": np.arange(1 << 16)}),
    "seeds": Sampler(SHARES, {"position": 7, "seed": np.arange(1 << 16)}),
    # Surprises in nats: 3.0 1.05 2.5 1.39 2.3 1.9 3.9; the entropy is 1.66. By distance: 5 3 1 4.
    "typical_p": Sampler(_only(5, 3, 1), {"typical_p": 0.7}),
    "typical_p without the best": Sampler(_only(5, 3), {"typical_p": 0.35}),
    # The deviation of the logits is 0.90: kept are shares from 0.35 * e^-0.90 = 0.142 up.
    "top_n_sigma": Sampler(_only(1, 3, 5), {"top_n_sigma": 1.0}),
    "dynamic temperature": Sampler(
        SHARES ** (1 / dynamic_temperature(0.9, 0.7, 2.0)),
        {"temperature": 0.9, "dynatemp_range": 0.7, "dynatemp_exponent": 2.0},
    ),
    "xtc": Sampler(
        0.4 * SHARES + 0.6 * _share(_only(5, 4, 2, 0, 6)),
        {"xtc_probability": 0.6, "xtc_threshold": 0.14},
    ),
    "xtc behind top_k": Sampler(
        _only(5, 4), {"xtc_probability": 1.0, "xtc_threshold": 0.12, "top_k": 4}
    ),
    "xtc with one choice": Sampler(SHARES, {"xtc_probability": 1.0, "xtc_threshold": 0.3}),
    "mirostat 2": Sampler(_only(1, 3, 5), {"mirostat_mode": 2, "mirostat_mu": 3.0}),
    "mirostat 2 at least one": Sampler(_only(1), {"mirostat_mode": 2, "mirostat_mu": 0.5}),
    "mirostat 1": Sampler(_only(1, 3, 5, 4), {"mirostat_mode": 1, "mirostat_mu": 3.0}),
}
NUM_DRAWS = 3000

CHI_SQUARE_BOUNDS = (1e-9, 15.1, 18.4, 21.1, 23.5, 25.7, 27.9)
"""Exceeded by one distribution in 10,000, by degrees of freedom."""


def check_distribution(name: str, sample: Sample, count: int = NUM_DRAWS) -> None:
    """Checks by chi-square that a sampler's draws of one row have its probabilities."""
    sampler = SAMPLERS[name]
    fields = {
        key: value[:count] if np.ndim(value) else value for key, value in sampler.fields.items()
    }
    batch = replace(sampler, fields=fields).batch(count)
    found = sample(np.log(SHARES)[None].astype(np.float32), batch)
    assert not found.failed.any()
    counts = np.bincount(found.token_ids, minlength=len(SHARES))
    shares = sampler.weights / sampler.weights.sum()
    possible = shares > 0
    assert not counts[~possible].any(), "a token that is not kept was drawn"
    expected = count * shares[possible]
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert chi_square < CHI_SQUARE_BOUNDS[int(possible.sum()) - 1]


def first_legal(
    logits: NDArray[np.float32], batch: SamplingBatch, masks: NDArray[np.bool_]
) -> list[int]:
    """Returns of each row, in the order of its unmasked scores, the first token its mask allows."""
    found = []
    for row, record, mask in zip(logits, batch.records, masks, strict=True):
        order = np.argsort(-sampling.scores(row.astype(np.float64), record), kind="stable")
        found.append(int(order[mask[order]][0]))
    return found


def check_first_legal(sample: Sample, *, rows: int = 60, vocab: int = 300) -> None:
    """Checks that a masked draw is the first legal token in the order of the unmasked scores."""
    g = rng(5)
    logits = (g.normal(size=(rows, vocab)) * g.uniform(0.5, 6, (rows, 1))).astype(np.float32)
    masks = g.random((rows, vocab)) < g.uniform(0.02, 0.9, (rows, 1))
    masks[:, 0] = True
    fields = {"temperature": g.uniform(0.3, 2, rows), "position": np.arange(rows)}
    free = batch_for(rows, vocab, **fields)
    masked = batch_for(rows, vocab, masks=masks, allowed_mask=np.arange(rows), **fields)
    np.testing.assert_array_equal(
        sample(logits, masked).token_ids, first_legal(logits, free, masks)
    )


def check_cutoff_proofs(sample: Sample, *, rows: int = 200, vocab: int = 120) -> None:
    """Checks that where a draw without cuts is legal and so are its proofs, the masked draw with
    cuts is the same token; and that proofs are found for most draws that cuts keep.
    """
    g = rng(6)
    logits = (g.normal(size=(rows, vocab)) * g.uniform(0.5, 5, (rows, 1))).astype(np.float32)
    logits[::4] = np.round(logits[::4])  # many equal ones
    masks = g.random((rows, vocab)) < np.where(g.random((rows, 1)) < 0.7, 0.97, 0.3)
    masks[np.arange(rows), g.integers(0, vocab, rows)] = True
    fields = {
        "temperature": g.uniform(0.3, 2, rows),
        "position": np.arange(rows),
        "seed": g.integers(0, 1 << 64, rows, dtype=np.uint64),
        "top_p": np.where(g.random(rows) < 0.3, 1, g.uniform(0.3, 1, rows)),
        "top_k": np.where(g.random(rows) < 0.5, 0, g.integers(1, vocab + 3, rows)),
        "min_p": np.where(g.random(rows) < 0.5, 0, g.uniform(0, 0.3, rows)),
    }
    batch = batch_for(rows, vocab, **fields)
    batch.keeps_logits, batch.without_cutoffs = True, g.random(rows) < 0.9
    found = sample(logits, batch)
    plain = sample(logits, batch_for(rows, vocab, **fields)).token_ids
    masked = batch_for(rows, vocab, masks=masks, allowed_mask=np.arange(rows), **fields)
    wanted = sample(logits, masked).token_ids
    assert found.proof_tokens is not None
    assert (found.proof_tokens[~batch.without_cutoffs] == -1).all()
    assert (found.token_ids[~batch.without_cutoffs] == plain[~batch.without_cutoffs]).all()
    shown = num_held = 0
    for row in np.flatnonzero(found.proof_tokens[:, 0] >= 0):
        ids = found.proof_tokens[row][found.proof_tokens[row] >= 0]
        assert ids[0] == found.token_ids[row] == plain[row]
        assert (found.proof_tokens[row][len(ids) :] == -1).all()
        shown += 1
        if masks[row][ids].all():
            assert wanted[row] == ids[0]
            num_held += 1
    assert shown > rows / 4
    assert num_held > rows / 10


def check_ranks_of_ties(sample: Sample) -> None:
    """Checks that each token's own rank is its place in the top list, equal logits included."""
    row = np.array([1, 5, 5, 2, 5, 2, 0], np.float32)
    batch = batch_for(7, 7, target_id=np.arange(7), num_logprobs=7)
    found = sample(np.tile(row, (7, 1)), batch)
    np.testing.assert_array_equal(found.top_ids, np.tile([1, 2, 4, 3, 5, 0, 6], (7, 1)))
    places = [found.top_ids[s].tolist().index(s) + 1 for s in range(7)]
    assert found.ranks.tolist() == places


def check_masked_distribution(sample: Sample, vocab: int, count: int = 4000) -> None:
    """Checks by chi-square that draws under a mask have the legal tokens' shares, and that a draw
    without the mask, made again under it where its token is not legal, is the same draw. `sample`
    draws all rows of a batch from one row of logits.
    """
    g = rng(vocab)
    row = g.uniform(-1, 1, (1, vocab)).astype(np.float32)
    mask = g.random(vocab) < 0.6
    mask[:2] = True
    fields = {"temperature": 0.8, "position": np.arange(count)}
    masked = batch_for(count, vocab, masks=mask[None], allowed_mask=0, **fields)
    tokens = sample(row, masked).token_ids
    free = sample(row, batch_for(count, vocab, **fields)).token_ids
    legal = mask[free]
    assert 0 < legal.sum() < count
    np.testing.assert_array_equal(tokens[legal], free[legal])
    weights = np.where(mask, np.exp(row[0].astype(np.float64) / 0.8), 0.0)
    expected = count * weights[mask] / weights.sum()
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[~mask].any(), "a token that is not legal was drawn"
    assert expected.min() > 5, "too few draws for chi-square"
    chi_square = float(((counts[mask] - expected) ** 2 / expected).sum())
    assert chi_square < chi_square_bound(int(mask.sum()) - 1)


def chi_square_bound(degrees: int) -> float:
    """Returns what one distribution in 10,000 exceeds (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.72 * math.sqrt(spread)) ** 3
