"""Drawing tokens in native code against the reference sampler, whose text both follow, at every
level.

Native computes probabilities in fp32: its token is one that the reference draws with u, top_p or
min_p moved by 1e-6. Logprobs differ by at most 1e-5; ranks, top lists and failures are equal.
"""

from dataclasses import fields
from functools import cache

import numpy as np
import pytest

from octavo.backends import sampling
from octavo.backends.batch import SamplingBatch
from octavo.program import ops
from octavo.program.program import Value, Weight
from tests.support.native_harness import Case, normal, plain, rng

NUDGE = 1e-6


def logits_case(logits):
    """Rows of logits come out as they go in."""
    return Case(
        {"x": logits}, lambda v: [ops.Scale(v["x"], Value("y", "tokens", logits.shape[1]), 1.0)]
    )


def sample_native(logits, batch, level, *, threads=1):
    case = logits_case(logits)
    step = case.batch(len(logits), pad=2)
    step.sampling = batch
    runnable = case.native(level, threads=threads)
    return runnable.run(step, case.memory(runnable)).samples


def ragged(generator, rows, vocab, most):
    """Starts, and ids without repetition within a row."""
    picks = [
        generator.choice(
            vocab, size=int(generator.integers(0, min(most, vocab) + 1)), replace=False
        )
        for _ in range(rows)
    ]
    return np.cumsum([0, *map(len, picks)]).astype(np.int32), np.concatenate([*picks, []]).astype(
        np.int32
    )


def random_batch(rows, vocab, seed):
    """Every option at once, each neutral in some rows."""
    g = rng(seed)

    def some(neutral, values, dtype):
        return np.where(g.random(rows) < 0.4, neutral, values).astype(dtype)

    bias_starts, bias_ids = ragged(g, rows, vocab, 9)
    bias_values = g.normal(size=len(bias_ids)) * 4
    bias_values[g.random(len(bias_ids)) < 0.2] = -np.inf
    history_starts, history_ids = ragged(g, rows, vocab, 40)
    masks = g.random((3, vocab)) < 0.5
    masks[:, g.integers(0, vocab)] = True
    return SamplingBatch(
        temperatures=some(0.0, g.uniform(0.05, 3, rows), np.float32),
        top_ks=some(0, g.integers(1, vocab + 3, rows), np.int32),
        top_ps=some(1.0, g.uniform(0.01, 1, rows), np.float32),
        min_ps=some(0.0, g.uniform(0, 0.5, rows) ** 3, np.float32),
        seeds=g.integers(0, 1 << 64, rows, dtype=np.uint64),
        sample_indices=g.integers(0, 5, rows).astype(np.uint32),
        positions=g.integers(0, 9000, rows).astype(np.uint32),
        target_ids=np.where(g.random(rows) < 0.15, g.integers(0, vocab, rows), -1).astype(np.int32),
        num_logprobs=g.integers(-1, min(vocab, 7), rows).astype(np.int32),
        repetition_penalties=some(1.0, g.uniform(0.7, 1.8, rows), np.float32),
        presence_penalties=some(0.0, g.uniform(-1, 2, rows), np.float32),
        frequency_penalties=some(0.0, g.uniform(-1, 2, rows), np.float32),
        history_starts=history_starts,
        history_ids=history_ids,
        history_counts=g.integers(0, 4, len(history_ids)).astype(np.int32),
        bias_starts=bias_starts,
        bias_ids=bias_ids,
        bias_values=bias_values.astype(np.float32),
        allowed=np.where(g.random(rows) < 0.7, -1, g.integers(0, 3, rows)).astype(np.int32),
        allowed_masks=masks,
    )


def random_logits(rows, vocab, seed):
    """Of many temperatures, with ties and -inf; four rows that fail."""
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


def possible_tokens(logits, batch, s):
    """What the reference draws from row s, exactly and with its numbers moved a little."""
    raw = logits[s].astype(np.float64)
    chosen = sampling._choose(raw, s, batch)
    if chosen is None or batch.target_ids[s] >= 0 or batch.temperatures[s] == 0:
        return {chosen}
    z = sampling._adjusted(raw, s, batch) / float(batch.temperatures[s])
    weights = np.exp(z - z.max())
    u = sampling.uniform(int(batch.seeds[s]), int(batch.positions[s]), int(batch.sample_indices[s]))
    found = set()
    for nudge in (-NUDGE, 0, NUDGE):
        kept = sampling._kept(z, weights, s, nudged(batch, nudge))
        sums = np.cumsum(weights[kept])
        for point in (u - NUDGE, u, u + NUDGE):
            found.add(
                int(kept[min(np.searchsorted(sums, point * sums[-1], side="right"), len(kept) - 1)])
            )
    return found


def nudged(batch, nudge):
    changed = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}
    changed["top_ps"] = np.where(batch.top_ps < 1, batch.top_ps.astype(np.float64) + nudge, 1.0)
    changed["min_ps"] = batch.min_ps.astype(np.float64) * (1 + nudge)
    return SamplingBatch(**changed)


def check(logits, batch, found, wanted, tokens):
    np.testing.assert_array_equal(found.failed, wanted.failed)
    for s, token in enumerate(found.token_ids.tolist()):
        assert wanted.failed[s] or token in tokens[s], (
            f"row {s}: drew {token}, the reference draws one of {tokens[s]}"
        )
        assert not wanted.failed[s] or token == 0
        count = int(batch.num_logprobs[s])
        if count < 0 or wanted.failed[s]:
            continue
        raw = logits[s].astype(np.float64)
        with np.errstate(invalid="ignore"):
            logprobs = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
        np.testing.assert_allclose(found.logprobs[s], logprobs[token], atol=1e-5, rtol=1e-6)
        assert found.ranks[s] == 1 + (raw > raw[token]).sum()
        np.testing.assert_array_equal(found.top_ids[s, :count], wanted.top_ids[s, :count])
        np.testing.assert_allclose(
            found.top_logprobs[s, :count], wanted.top_logprobs[s, :count], atol=1e-5, rtol=1e-6
        )


@cache
def drawn(rows, vocab, seed):
    logits, batch = random_logits(rows, vocab, seed), random_batch(rows, vocab, seed + 1)
    with np.errstate(all="ignore"):
        return (
            logits,
            batch,
            sampling.sample(logits, batch),
            [possible_tokens(logits, batch, s) for s in range(rows)],
        )


@pytest.mark.parametrize(
    ("rows", "vocab", "seed"),
    [(1, 1, 1), (130, 5, 2), (65, 100, 3), (130, 1003, 4), (20, 49152, 5)],
)
def test_random_batches(level, rows, vocab, seed):
    logits, batch, wanted, tokens = drawn(rows, vocab, seed)
    check(logits, batch, sample_native(logits, batch, level), wanted, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_random_batches(level, seed):
    logits, batch, wanted, tokens = drawn(
        260, int(rng(seed).choice([2, 3, 17, 64, 300, 2000])), seed
    )
    check(logits, batch, sample_native(logits, batch, level), wanted, tokens)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_company_do_not_matter(level, threads):
    """Bitwise: the whole batch, and some of its rows in another order."""
    logits, batch, _, _ = drawn(130, 1003, 4)
    found = sample_native(logits, batch, level, threads=threads)
    order = rng(7).permutation(130)[:70]
    part = sample_native(logits[order], taken(batch, order), level)
    for name in ("token_ids", "failed", "logprobs", "ranks"):
        np.testing.assert_array_equal(
            getattr(part, name), getattr(found, name)[order], err_msg=name
        )
    for row, s in enumerate(order):
        count = max(int(batch.num_logprobs[s]), 0)
        np.testing.assert_array_equal(part.top_logprobs[row, :count], found.top_logprobs[s, :count])


def taken(batch, order):
    """Those rows of a batch."""
    columns = {}
    for entry in fields(batch):
        array = getattr(batch, entry.name)
        columns[entry.name] = array[order] if len(array) == len(batch.seeds) else array
    for kind, names in {
        "bias": ("bias_ids", "bias_values"),
        "history": ("history_ids", "history_counts"),
    }.items():
        starts = getattr(batch, f"{kind}_starts")
        index = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
        columns |= {name: getattr(batch, name)[index] for name in names}
        columns[f"{kind}_starts"] = np.cumsum(
            [0, *(starts[s + 1] - starts[s] for s in order)]
        ).astype(np.int32)
    return SamplingBatch(**columns)


def head_case(x, weight):
    """Logits come out of a product over sampled rows, as a model's do."""
    matrix, sampled, logits = (
        Weight("head", weight.shape),
        Value("sampled", "samples", x.shape[1]),
        Value("y", "samples", len(weight)),
    )
    return Case(
        {"x": x},
        lambda v: [ops.GatherRows(v["x"], sampled), ops.Linear(sampled, (logits,), (matrix,))],
        plain({"head": weight}),
    )


def greedy_batch(rows, vocab):
    """The best of each row and nothing else: the output product keeps it, and writes no logits."""
    batch = random_batch(rows, vocab, 1)
    for zero in (
        batch.temperatures,
        batch.presence_penalties,
        batch.frequency_penalties,
        batch.bias_starts,
    ):
        zero[:] = 0
    for none in (batch.target_ids, batch.num_logprobs, batch.allowed):
        none[:] = -1
    batch.repetition_penalties[:] = 1
    return batch


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 17), (3, 1003), (130, 330)])
def test_the_best_is_kept_where_logits_are_made(level, rows, vocab, threads):
    """Ties go to the lowest id, also between tiles and threads; rows with NaN or no finite best
    fail; as with logits in memory.
    """
    weight = np.round(normal(vocab, 32, seed=vocab) * 2)
    weight[vocab // 2 :] = weight[: vocab - vocab // 2]
    x = np.round(normal(rows, 32, seed=rows))
    if rows > 4:
        x[1], x[2, 3], weight[vocab - 1, 5] = 0, np.nan, np.inf
        x[:4, 5] = [-1, 0, 1, 1]
    case = head_case(x, weight)
    step, runnable = case.batch(rows, pad=1), case.native(level, threads=threads)
    memory = case.memory(runnable)
    logits = runnable.run(step, memory).arrays["logits"]
    step.sampling = greedy_batch(rows, vocab)
    with np.errstate(all="ignore"):
        wanted = sampling.sample(logits, step.sampling)
    for _ in range(2):
        found = runnable.run(step, memory).samples
        np.testing.assert_array_equal(found.failed, wanted.failed)
        np.testing.assert_array_equal(found.token_ids, wanted.token_ids)
    step.sampling.temperatures[0] = 1.0
    found = runnable.run(step, memory).samples
    np.testing.assert_array_equal(found.token_ids[1:], wanted.token_ids[1:])


def test_no_row_is_drawn(level):
    case = logits_case(random_logits(4, 10, 1))
    step = case.batch(4, pad=0)
    step.sample_rows, step.sampling = step.sample_rows[:0], random_batch(0, 10, 1)
    runnable = case.native(level)
    assert runnable.run(step, case.memory(runnable)).samples.token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 1e4])
def test_extreme_temperatures(level, temperature):
    logits = random_logits(6, 50, 3)
    batch = random_batch(6, 50, 3)
    batch.temperatures[:], batch.target_ids[:] = temperature, -1
    with np.errstate(all="ignore"):
        wanted, tokens = (
            sampling.sample(logits, batch),
            [possible_tokens(logits, batch, s) for s in range(6)],
        )
    check(logits, batch, sample_native(logits, batch, level), wanted, tokens)


def test_more_logprobs_than_tokens(level):
    logits, batch = random_logits(2, 5, 1), random_batch(2, 5, 1)
    batch.num_logprobs[:] = 20
    found, wanted = sample_native(logits, batch, level), sampling.sample(logits, batch)
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)


def test_arrays_of_another_type_are_refused():
    """Never converted in silence: a copy would not outlive the call, and a draw would read what is
    not there.
    """
    logits, batch = random_logits(2, 5, 1), random_batch(2, 5, 1)
    batch.top_ks = batch.top_ks.astype(np.int64)
    with pytest.raises(TypeError, match="top_ks: not a C-contiguous array of the type"):
        sample_native(logits, batch, None)
