"""Batches of draws for every backend's tests, and what their results are compared with.

Backends differ in the `sample(logits, batch)` that a test passes in. Knows no backend but the
reference, whose text all follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor import sampling
from octavo.executor.batch import SampleResult, SamplingBatch, packed_masks, sampling_records

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
