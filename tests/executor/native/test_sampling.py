"""Draws in native code against the reference sampler, whose text both follow, at every level.

Noise and scores are computed in fp64 at the tokens that may win, so native draws the reference's
token wherever the logits are not changed. Penalties, top_p and min_p are computed in fp32: there
its token is one that the reference draws with the borders moved by 1e-6. Logprobs differ by at most
1e-5; ranks, top lists and failures are equal.
"""

import numpy as np
import pytest

from octavo.api.errors import BackendUnavailable
from octavo.executor import sampling
from octavo.executor.batch import SAMPLING_RECORD, Resample, packed_masks, sampling_records
from octavo.executor.native.extension import native_module
from octavo.program import ops
from octavo.program.program import Value, Weight
from tests.support.draw_laws import (
    SAMPLERS,
    check_cutoff_proofs,
    check_distribution,
    check_first_legal,
    check_masked_distribution,
    check_ranks_of_ties,
)
from tests.support.native_harness import Case, normal, plain, require_native, rng
from tests.support.sampling_cases import (
    Drawn,
    batch_for,
    check,
    drawn,
    possible_tokens,
    random_batch,
    random_logits,
    taken,
)


def logits_case(logits):
    """Returns a Program whose rows of logits come out as they go in."""
    return Case(
        {"x": logits}, lambda v: [ops.Scale(v["x"], Value("y", "tokens", logits.shape[1]), 1.0)]
    )


def sample_native(logits, batch, level, *, threads=1):
    case = logits_case(logits)
    step = case.batch(len(logits), pad=2)
    step.sampling = batch
    runnable = case.native(level, threads=threads)
    return runnable.run(step, case.memory(runnable)).samples


def checked_native(logits, batch, level, check):
    """Returns what is drawn where a check looks at the draws."""
    case = logits_case(logits)
    step = case.batch(len(logits), pad=2)
    step.sampling = batch
    runnable = case.native(level, threads=2)
    return runnable.run(step, case.memory(runnable), check).samples


def sample_repeated(level):
    """Returns a sampler of batches with more rows than their logits, which are drawn from again."""

    def sample(logits, batch):
        case = logits_case(logits)
        step = case.batch(len(logits), pad=0)
        step.sample_rows = np.arange(len(batch), dtype=np.int32) % len(logits)
        step.sampling = batch
        runnable = case.native(level, threads=2)
        return runnable.run(step, case.memory(runnable)).samples

    return sample


def case_of(logits, batch):
    """Returns rows with what the reference makes of them."""
    with np.errstate(all="ignore"):
        wanted = sampling.sample(logits, batch)
        tokens = [possible_tokens(logits, batch, wanted, s) for s in range(len(logits))]
    return Drawn(logits, batch, wanted, tokens)


@pytest.mark.parametrize(
    ("rows", "vocab", "seed"),
    [(1, 1, 1), (130, 5, 2), (65, 100, 3), (130, 1003, 4), (20, 49152, 5)],
)
def test_random_batches(level, rows, vocab, seed):
    """Rows with every option at once draw what the reference draws."""
    case = drawn(rows, vocab, seed)
    check(case, sample_native(case.logits, case.batch, level))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_random_batches(level, seed):
    """Many more rows with every option at once draw what the reference draws."""
    case = drawn(260, int(rng(seed).choice([2, 3, 17, 64, 300, 2000])), seed)
    check(case, sample_native(case.logits, case.batch, level))


@pytest.mark.parametrize("width", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 130, 5000])
def test_unchanged_logits_draw_the_references_token(level, vocab, width):
    """Without penalties and cuts the token is exactly the reference's, flat logits or steep."""
    g = rng(vocab)
    rows = 40
    logits = (g.normal(size=(rows, vocab)) * width).astype(np.float32)
    batch = batch_for(
        rows,
        vocab,
        temperature=g.uniform(0.1, 2, rows),
        seed=g.integers(0, 1 << 64, rows, dtype=np.uint64),
        position=g.integers(0, 1 << 32, rows),
        sample_index=g.integers(0, 1 << 32, rows),
    )
    np.testing.assert_array_equal(
        sample_native(logits, batch, level).token_ids, sampling.sample(logits, batch).token_ids
    )


@pytest.mark.parametrize("vocab", [1, 5, 16, 65, 5000])
def test_candidates_are_what_draws_under_masks_would_take(level, vocab):
    """A checked draw tells the reference's tokens in the reference's order, greedy and sampled."""
    g, rows = rng(vocab), 24
    logits = np.round(g.normal(size=(rows, vocab)) * 3, 1).astype(np.float32)
    temperatures = np.where(np.arange(rows) % 3 == 0, 0, g.uniform(0.1, 2, rows))
    seeds = g.integers(0, 1 << 64, rows, dtype=np.uint64)
    bias = [[(row % vocab, -np.inf)] * (vocab > 1) for row in range(rows)]
    batch = batch_for(rows, vocab, temperature=temperatures, seed=seeds, bias=bias)
    batch.keeps_logits = True
    some = np.arange(0, rows, 5, dtype=np.int32)
    read = []

    def look(samples, kept):
        read.append((samples.token_ids.copy(), kept.candidates(some)))

    drawn_tokens = checked_native(logits, batch, level, look).token_ids
    ((token_ids, found),) = read
    wanted = [sampling.row_candidates(logits[s], batch, s) for s in some]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found[:, 0], token_ids[some])
    np.testing.assert_array_equal(drawn_tokens, sampling.sample(logits, batch).token_ids)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_late_rows_are_drawn_under_their_masks_alone(level, temperature):
    """A late row is left alone until its mask is known; then it draws as one that had it before."""
    g, rows, vocab = rng(3), 9, 130
    logits = (g.normal(size=(rows, vocab)) * 3).astype(np.float32)
    late = np.arange(rows) % 2 == 0
    masks = packed_masks(g.random((rows, vocab)) < 0.2)
    batch = batch_for(rows, vocab, temperature=temperature, top_p=0.8, num_logprobs=2)
    batch.keeps_logits, batch.deferred = True, late
    plain = batch_for(rows, vocab, temperature=temperature, top_p=0.8, num_logprobs=2)
    plain.records["allowed_mask"] = np.where(late, np.arange(rows), -1)
    plain.allowed_masks = masks

    def draw(samples, kept):
        assert not samples.failed.any()
        assert not samples.token_ids[late].any()
        some = np.flatnonzero(late).astype(np.int32)
        return Resample(some, masks[some])

    found = checked_native(logits, batch, level, draw)
    wanted = sample_native(logits, plain, level)
    for name in ("token_ids", "failed", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_have_their_probabilities(level, name):
    """Every sampler draws from the distribution that its definition gives."""
    check_distribution(name, sample_repeated(level))


def test_the_masked_draw_is_the_first_legal_token(level):
    """A mask takes the first legal token in the order of the reference's unmasked scores."""
    check_first_legal(lambda logits, batch: sample_native(logits, batch, level))


@pytest.mark.parametrize("vocab", [3, 20, 120, 1000])
def test_witnesses_show_that_cuts_keep_a_draw(level, vocab):
    """A draw without cuts whose proofs are legal is the masked draw with them."""
    check_cutoff_proofs(lambda logits, batch: sample_native(logits, batch, level), vocab=vocab)


def test_the_references_witnesses_are_found(level):
    """Native finds the reference's proofs, but where a border lies within its rounding."""
    g, rows, vocab = rng(8), 300, 400
    logits = (g.normal(size=(rows, vocab)) * 3).astype(np.float32)
    batch = batch_for(
        rows,
        vocab,
        temperature=g.uniform(0.3, 2, rows),
        top_p=g.uniform(0.5, 1, rows),
        top_k=np.where(g.random(rows) < 0.5, 0, g.integers(1, 60, rows)),
        min_p=np.where(g.random(rows) < 0.5, 0, 0.05),
        position=np.arange(rows),
    )
    batch.keeps_logits, batch.without_cutoffs = True, np.ones(rows, np.bool_)
    found = sample_native(logits, batch, level)
    wanted = sampling.sample(logits, batch)
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids)
    unlike = (found.proof_tokens != wanted.proof_tokens).any(axis=1)
    assert unlike.sum() <= 1


@pytest.mark.parametrize("vocab", [5, 8, 13, 20])
def test_masked_draws_have_the_legal_tokens_shares(level, vocab):
    """A mask leaves the legal tokens their shares among themselves."""
    check_masked_distribution(sample_repeated(level), vocab)


def test_a_rank_is_a_place_in_the_top_list(level):
    """A token's rank is its place in the top list, which orders equal logits by id."""
    check_ranks_of_ties(lambda logits, batch: sample_native(logits, batch, level))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_company_do_not_matter(level, threads):
    """The whole batch, and some of its rows in another order, have the same bits."""
    case = drawn(130, 1003, 4)
    found = sample_native(case.logits, case.batch, level, threads=threads)
    order = rng(7).permutation(130)[:70]
    part = sample_native(case.logits[order], taken(case.batch, order), level)
    for name in ("token_ids", "failed", "logprobs", "ranks"):
        np.testing.assert_array_equal(
            getattr(part, name), getattr(found, name)[order], err_msg=name
        )
    for row, s in enumerate(order):
        count = max(int(case.batch.records["num_logprobs"][s]), 0)
        np.testing.assert_array_equal(part.top_logprobs[row, :count], found.top_logprobs[s, :count])


def head_case(x, weight):
    """Returns a Program whose logits are a product over sampled rows, as a model's are."""
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
    """Returns rows that want only their best, which the output product keeps without logits."""
    batch = batch_for(rows, vocab, masks=np.ones((1, vocab)), history=[[(0, 1)]] * rows)
    assert all(batch.records == sampling_records(rows, seed=1))
    return batch


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 17), (3, 1003), (130, 330)])
def test_the_best_is_kept_where_logits_are_made(level, rows, vocab, threads):
    """Ties go to the lowest id between tiles and threads too, and rows with NaN or without a finite
    best fail, as they do with logits in memory.
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
    step.sampling.records["temperature"][0] = 1.0
    found = runnable.run(step, memory).samples
    np.testing.assert_array_equal(found.token_ids[1:], wanted.token_ids[1:])


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 17), (33, 1003)])
def test_best_rows_that_are_checked_keep_their_logits(level, rows, vocab):
    """A step that draws nothing but best logits has all of them for a check, which changes no
    draw.
    """
    case = head_case(normal(rows, 32, seed=rows), normal(vocab, 32, seed=vocab))
    step, runnable = case.batch(rows, pad=1), case.native(level, threads=2)
    memory = case.memory(runnable)
    logits = runnable.run(step, memory).arrays["logits"]
    step.sampling = greedy_batch(rows, vocab)
    step.sampling.keeps_logits = True
    some, read = np.arange(0, rows, 2, dtype=np.int32), {}

    def look(samples, kept):
        read["logits"] = [kept.logits(s) for s in range(rows)]
        read["candidates"] = kept.candidates(some)

    found = runnable.run(step, memory, look).samples
    np.testing.assert_array_equal(read["logits"], logits)
    np.testing.assert_array_equal(found.token_ids, logits.argmax(axis=1))
    wanted = [sampling.row_candidates(logits[s], step.sampling, s) for s in some]
    np.testing.assert_array_equal(read["candidates"], wanted)


def test_no_row_is_drawn(level):
    """A step that samples no row returns an empty result."""
    case = logits_case(random_logits(4, 10, 1))
    step = case.batch(4, pad=0)
    step.sample_rows, step.sampling = step.sample_rows[:0], random_batch(0, 10, 1)
    runnable = case.native(level)
    assert runnable.run(step, case.memory(runnable)).samples.token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 1e4, 3e38])
def test_extreme_temperatures(level, temperature):
    """Temperatures at the ends of fp32 draw what the reference draws."""
    logits, batch = random_logits(6, 50, 3), random_batch(6, 50, 3)
    batch.records["temperature"], batch.records["target_id"] = temperature, -1
    check(case_of(logits, batch), sample_native(logits, batch, level))


def test_more_logprobs_than_tokens(level):
    """The top list is at most the vocabulary."""
    logits, batch = random_logits(2, 5, 1), random_batch(2, 5, 1)
    batch.records["num_logprobs"] = 20
    found, wanted = sample_native(logits, batch, level), sampling.sample(logits, batch)
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)


def test_arrays_of_another_type_are_refused():
    """Arrays are never converted in silence: a copy would not outlive the call."""
    require_native()
    logits, batch = random_logits(2, 5, 1), random_batch(2, 5, 1)
    batch.bias_ids = batch.bias_ids.astype(np.int64)
    with pytest.raises(TypeError, match="bias_ids: not a C-contiguous array of the type"):
        sample_native(logits, batch, None)


LARGER_RECORD = np.dtype([*SAMPLING_RECORD.descr, ("more", np.float64)])


@pytest.mark.parametrize("records", [sampling_records(3), np.zeros(2, LARGER_RECORD)])
def test_records_of_another_number_or_size_are_refused(records):
    """A batch has one record of the right size for each sampled row."""
    require_native()
    logits, batch = random_logits(2, 5, 1), random_batch(2, 5, 1)
    batch.records = records
    with pytest.raises(TypeError, match="records: not a C-contiguous array of one SAMPLING_RECORD"):
        sample_native(logits, batch, None)


def test_the_record_is_the_structs():
    """Python's record has the fields, types and offsets of the C++ struct."""
    require_native()
    assert np.dtype(native_module().SAMPLING_RECORD) == SAMPLING_RECORD


def test_an_extension_of_other_sources_is_refused(monkeypatch):
    """An extension whose record differs is refused with the command that builds it again."""
    require_native()
    other = dict(native_module().SAMPLING_RECORD) | {"itemsize": 128}
    monkeypatch.setattr(native_module(), "SAMPLING_RECORD", other)
    with pytest.raises(BackendUnavailable, match=r"built from .*different"):
        native_module()
