"""Batches of draws for every backend's tests, and what their results are compared with.

Backends differ in the `sample(logits, batch)` that a test passes in. Knows no backend but the
reference, whose text all follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import sampling
from octavo.backends.batch import SampleResult, SamplingBatch, packed_masks, sampling_records

NUDGE = 1e-6
"""How far a backend that computes in fp32 may move the borders of a draw."""

Sample = Callable[[NDArray[np.float32], SamplingBatch], SampleResult]
Entries = Sequence[tuple[int, float]]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def csr(rows: Sequence[Entries]) -> tuple[NDArray[np.int32], list[int], list[float]]:
    """Returns where each row's entries begin, their ids and their values."""
    entries = [entry for row in rows for entry in row]
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return starts, [token for token, _ in entries], [value for _, value in entries]


def batch_for(
    num_rows: int,
    vocab_size: int = 4,
    *,
    bias: Sequence[Entries] | None = None,
    history: Sequence[Entries] | None = None,
    masks: Any = None,
    **fields: Any,
) -> SamplingBatch:
    """Returns a batch of greedy rows but for the record's `fields`; `bias` and `history` hold
    (id, value) pairs of each row.
    """
    bias_starts, bias_ids, bias_values = csr(bias or [[]] * num_rows)
    history_starts, history_ids, history_counts = csr(history or [[]] * num_rows)
    return SamplingBatch(
        records=sampling_records(num_rows, **{"seed": 1} | fields),
        history_starts=history_starts,
        history_ids=np.array(history_ids, np.int32),
        history_counts=np.array(history_counts, np.int32),
        bias_starts=bias_starts,
        bias_ids=np.array(bias_ids, np.int32),
        bias_values=np.array(bias_values, np.float32),
        allowed_masks=packed_masks(
            np.array(masks if masks is not None else np.zeros((0, vocab_size)), np.bool_)
        ),
    )


def taken(batch: SamplingBatch, order: NDArray[np.intp]) -> SamplingBatch:
    """Returns the rows `order` of a batch as another batch."""
    parts = [batch.part(s, s + 1) for s in order]

    def joined(name: str) -> NDArray:
        return np.concatenate([getattr(part, name) for part in parts])

    def starts(name: str) -> NDArray[np.int32]:
        return np.cumsum([0, *(getattr(part, name)[1] for part in parts)]).astype(np.int32)

    return SamplingBatch(
        records=batch.records[order],
        history_starts=starts("history_starts"),
        history_ids=joined("history_ids"),
        history_counts=joined("history_counts"),
        bias_starts=starts("bias_starts"),
        bias_ids=joined("bias_ids"),
        bias_values=joined("bias_values"),
        allowed_masks=batch.allowed_masks,
    )


# -- random batches --


def random_batch(rows: int, vocab: int, seed: int) -> SamplingBatch:
    """Returns rows with every option at once, each neutral in some rows."""
    g = rng(seed)

    def some(neutral: float, values: NDArray) -> NDArray:
        return np.where(g.random(rows) < 0.4, neutral, values)

    bias_starts, bias_ids = _ragged(g, rows, vocab, 9)
    bias_values = g.normal(size=len(bias_ids)) * 4
    bias_values[g.random(len(bias_ids)) < 0.2] = -np.inf
    history_starts, history_ids = _ragged(g, rows, vocab, 40)
    masks = g.random((3, vocab)) < 0.5
    masks[:, g.integers(0, vocab)] = True
    records = sampling_records(
        rows,
        temperature=some(0.0, g.uniform(0.05, 3, rows)),
        top_k=some(0, g.integers(1, vocab + 3, rows)),
        top_p=some(1.0, g.uniform(0.01, 1, rows)),
        min_p=some(0.0, g.uniform(0, 0.5, rows) ** 3),
        seed=g.integers(0, 1 << 64, rows, dtype=np.uint64),
        sample_index=g.integers(0, 5, rows),
        position=g.integers(0, 9000, rows),
        target_id=np.where(g.random(rows) < 0.15, g.integers(0, vocab, rows), -1),
        num_logprobs=g.integers(-1, min(vocab, 7), rows),
        repetition_penalty=some(1.0, g.uniform(0.7, 1.8, rows)),
        presence_penalty=some(0.0, g.uniform(-1, 2, rows)),
        frequency_penalty=some(0.0, g.uniform(-1, 2, rows)),
        allowed_mask=np.where(g.random(rows) < 0.7, -1, g.integers(0, 3, rows)),
        **_random_filters(g, rows),
    )
    return SamplingBatch(
        records=records,
        history_starts=history_starts,
        history_ids=history_ids,
        history_counts=g.integers(0, 4, len(history_ids)).astype(np.int32),
        bias_starts=bias_starts,
        bias_ids=bias_ids,
        bias_values=bias_values.astype(np.float32),
        allowed_masks=packed_masks(masks),
    )


def _random_filters(g: np.random.Generator, rows: int) -> dict[str, NDArray]:
    """Returns fields of filters that look at whole distributions, each off in most rows."""

    def some(neutral: float, values: NDArray) -> NDArray:
        return np.where(g.random(rows) < 0.75, neutral, values)

    return {
        "typical_p": some(1.0, g.uniform(0.05, 1, rows)),
        "top_n_sigma": some(0.0, g.uniform(0.3, 3, rows)),
        "dynatemp_range": some(0.0, g.uniform(0.05, 1.5, rows)),
        "dynatemp_exponent": g.uniform(0.3, 3, rows),
        "xtc_probability": some(0.0, g.uniform(0, 1.5, rows)),
        "xtc_threshold": g.uniform(0.01, 0.4, rows),
        "mirostat_mode": some(0, g.integers(1, 3, rows)),
        "mirostat_mu": g.uniform(0, 12, rows),
    }


def _ragged(
    generator: np.random.Generator, rows: int, vocab: int, most: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns starts, and ids without repetition within a row."""
    picks = [
        generator.choice(
            vocab, size=int(generator.integers(0, min(most, vocab) + 1)), replace=False
        )
        for _ in range(rows)
    ]
    starts = np.cumsum([0, *map(len, picks)]).astype(np.int32)
    return starts, np.concatenate([*picks, []]).astype(np.int32)


def random_logits(rows: int, vocab: int, seed: int) -> NDArray[np.float32]:
    """Returns logits of many widths, with ties and -inf; four rows fail."""
    g = rng(seed)
    logits = (g.normal(size=(rows, vocab)) * g.uniform(0.2, 12, (rows, 1))).astype(np.float32)
    logits[::5] = np.round(logits[::5])
    logits[3::7, vocab // 2 :] = -np.inf
    if rows > 12:
        logits[6, vocab - 1] = np.nan
        logits[9, 0] = np.nan
        logits[10] = -np.inf
        logits[12, vocab // 3] = np.inf
    return logits


@dataclass(frozen=True)
class Drawn:
    """Random rows and what the reference makes of them."""

    logits: NDArray[np.float32]
    batch: SamplingBatch
    wanted: SampleResult
    tokens: list[set[int | None]]
    """Tokens that rounding may make of each row."""


@cache
def drawn(rows: int, vocab: int, seed: int) -> Drawn:
    logits, batch = random_logits(rows, vocab, seed), random_batch(rows, vocab, seed + 1)
    with np.errstate(all="ignore"):
        wanted = sampling.sample(logits, batch)
        tokens = [possible_tokens(logits, batch, wanted, s) for s in range(rows)]
    return Drawn(logits, batch, wanted, tokens)


def possible_tokens(
    logits: NDArray[np.float32], batch: SamplingBatch, wanted: SampleResult, s: int
) -> set[int | None]:
    """Returns what row s may draw where penalties, top_p and min_p are rounded otherwise."""
    record, token = batch.records[s], int(wanted.token_ids[s])
    if wanted.failed[s] or record["target_id"] >= 0 or record["temperature"] == 0:
        return {token}
    z = sampling.changed_logits(logits[s].astype(np.float64), s, batch)
    slack = NUDGE * (1 + np.abs(z[np.isfinite(z)]).max() / float(record["temperature"]))
    found: set[int | None] = {token}
    for nudge in (-NUDGE, 0.0, NUDGE):
        scores = sampling.scores(z, _nudged(record, nudge))
        found |= set(np.flatnonzero(scores >= scores.max() - slack).tolist())
    return found


def _nudged(record: np.void, nudge: float) -> Mapping[str, Any]:
    """Returns a record's fields with the borders of top_p and min_p moved, in fp64."""
    fields: dict[str, Any] = {name: record[name] for name in record.dtype.names or ()}
    if record["top_p"] < 1:
        fields["top_p"] = float(record["top_p"]) + nudge
    if record["typical_p"] < 1:
        fields["typical_p"] = float(record["typical_p"]) + nudge
    for name in ("min_p", "top_n_sigma", "xtc_threshold", "mirostat_mu"):
        fields[name] = float(record[name]) * (1 + nudge)
    return fields


def check(case: Drawn, found: SampleResult, rows: slice = slice(None)) -> None:
    """Compares results of the case's `rows` with the reference's."""
    wanted, logits = case.wanted, case.logits[rows]
    records, failed, tokens = case.batch.records[rows], wanted.failed[rows], case.tokens[rows]
    np.testing.assert_array_equal(found.failed, failed)
    _check_surprises(case, found, rows)
    for s, token in enumerate(found.token_ids.tolist()):
        assert token in tokens[s], f"row {s}: drew {token}, the reference one of {tokens[s]}"
        count = int(records["num_logprobs"][s])
        if count < 0 or failed[s]:
            continue
        raw = logits[s].astype(np.float64)
        order = np.argsort(-raw, kind="stable")
        with np.errstate(invalid="ignore"):
            logprobs = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
        np.testing.assert_allclose(found.logprobs[s], logprobs[token], atol=1e-5, rtol=1e-6)
        assert order[found.ranks[s] - 1] == token
        np.testing.assert_array_equal(found.top_ids[s, :count], order[:count])
        np.testing.assert_allclose(
            found.top_logprobs[s, :count], logprobs[order[:count]], atol=1e-5, rtol=1e-6
        )


def _check_surprises(case: Drawn, found: SampleResult, rows: slice) -> None:
    """Compares the surprises of rows that drew with mirostat what the reference drew."""
    wanted = case.wanted
    records = case.batch.records
    if wanted.surprises is None or found.surprises is None:
        assert wanted.surprises is None or not (records[rows]["mirostat_mode"] > 0).any()
        return
    drew = (records["mirostat_mode"] > 0) & (records["temperature"] > 0) & ~wanted.failed
    same = found.token_ids == wanted.token_ids[rows]
    # A border between two tokens may lie otherwise by a rounding, and with it the sum.
    sure = np.array([len(tokens) == 1 for tokens in case.tokens[rows]])
    compared = drew[rows] & (records["target_id"][rows] < 0) & same & sure
    np.testing.assert_allclose(
        found.surprises[compared], wanted.surprises[rows][compared], atol=1e-4
    )


# -- distributions --


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


def check_witnesses(sample: Sample, *, rows: int = 200, vocab: int = 120) -> None:
    """Checks that where a draw without cuts is legal and so are its witnesses, the masked draw with
    cuts is the same token; and that witnesses are found for most draws that cuts keep.
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
    uncut = batch_for(rows, vocab, **fields)
    uncut.keeps_logits, uncut.uncut = True, g.random(rows) < 0.9
    found = sample(logits, uncut)
    plain = sample(logits, batch_for(rows, vocab, **fields)).token_ids
    masked = batch_for(rows, vocab, masks=masks, allowed_mask=np.arange(rows), **fields)
    wanted = sample(logits, masked).token_ids
    assert found.witnesses is not None
    assert (found.witnesses[~uncut.uncut] == -1).all()
    assert (found.token_ids[~uncut.uncut] == plain[~uncut.uncut]).all()
    shown = num_held = 0
    for row in np.flatnonzero(found.witnesses[:, 0] >= 0):
        ids = found.witnesses[row][found.witnesses[row] >= 0]
        assert ids[0] == found.token_ids[row] == plain[row]
        assert (found.witnesses[row][len(ids) :] == -1).all()
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
