"""Triton's draw without a sort, in its interpreter, against the reference sampler: the same tokens
wherever no tie lies within rounding.
"""

import numpy as np
import pytest
import torch

from octavo.executor import sampling
from octavo.executor.batch import sampling_records
from octavo.executor.noise import gumbel, noise_words
from octavo.executor.torch.plain import PlainKernels
from octavo.executor.torch.sampler_ops import record_words
from octavo.executor.torch.sampling import (
    get_sampling_stages,
    join_results,
    make_sampling_arrays,
    sample,
)
from octavo.executor.torch.triton import pick
from octavo.executor.torch.triton.device import device_name
from octavo.executor.torch.triton.kernels import TritonKernels
from tests.executor.torch.triton.device import DEVICE
from tests.support.draw_laws import check_distribution, check_first_legal
from tests.support.sampling_cases import (
    batch_for,
    check,
    drawn,
    random_batch,
    random_logits,
    rng,
    taken,
)
from tests.support.tiers import examples

TRITON = TritonKernels(DEVICE)


def sample_triton(logits, batch):
    """Draws all rows at once; fewer logits than rows are drawn from again."""
    wants = get_sampling_stages(batch, logits.shape[1])
    inputs = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
        for name, array in make_sampling_arrays(batch, wants).items()
    }
    rows = torch.from_numpy(np.resize(logits, (len(batch), logits.shape[1]))).to(DEVICE)
    return join_results([sample(rows, inputs, wants, TRITON)])


def words_of(records):
    return torch.from_numpy(record_words(records)).to(DEVICE)


def picked(z, *, cuts=False, **fields):
    """Returns the kernel's tokens of rows whose records have these fields."""
    records = words_of(sampling_records(len(z), temperature=1.0, **fields))
    z = torch.from_numpy(z).to(DEVICE)
    ones = torch.ones(len(z), dtype=torch.float64, device=DEVICE)
    found = pick.pick(z, z.amax(dim=1), ones, records, cuts=cuts, device=device_name(DEVICE))
    return found.cpu().numpy()


@pytest.mark.parametrize(
    ("rows", "vocab", "seed"), [(1, 1, 1), (60, 5, 2), (65, 100, 3), (60, 1003, 4), (5, 49152, 5)]
)
def test_random_batches(rows, vocab, seed):
    """Rows with every option at once draw what the reference draws."""
    case = drawn(rows, vocab, seed)
    with np.errstate(all="ignore"):
        check(case, sample_triton(case.logits, case.batch))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 230))
def test_more_random_batches(seed):
    """Many more rows with every option at once draw what the reference draws."""
    case = drawn(130, int(rng(seed).choice([2, 3, 17, 64, 300, 2000, 5000])), seed)
    with np.errstate(all="ignore"):
        check(case, sample_triton(case.logits, case.batch))


# The kernel's interpreter takes a quarter of a second for a row: other samplers differ from these
# before the kernel, whose tokens the tests above compare one by one.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "all cuts"])
def test_draws_have_their_probabilities(name):
    """Every sampler that the kernel computes has the distribution of its definition."""
    check_distribution(name, sample_triton, count=400)


def test_the_masked_draw_is_the_first_legal_token():
    """A mask takes the first legal token in the order of the reference's unmasked scores."""
    check_first_legal(sample_triton, rows=12)


@pytest.mark.parametrize("vocab", [1, 3, 4, 130, 4099])
def test_unchanged_logits_draw_the_references_token(vocab):
    """Draws agree over several tiles and parts of a quad, whatever the counter's words."""
    g = rng(vocab)
    logits = (g.normal(size=(8, vocab)) * g.uniform(0, 4, (8, 1))).astype(np.float32)
    batch = batch_for(
        8,
        vocab,
        temperature=g.uniform(0.1, 2, 8),
        seed=g.integers(0, 1 << 64, 8, dtype=np.uint64),
        position=g.integers(0, 1 << 32, 8),
        sample_index=g.integers(0, 1 << 32, 8),
    )
    np.testing.assert_array_equal(
        sample_triton(logits, batch).token_ids, sampling.sample(logits, batch).token_ids
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"top_p": 0.999},
        {"top_k": 6, "top_p": 0.7},
        {"min_p": 1.0},
        {"min_p": 0.4, "top_k": 3, "top_p": 0.6},
    ],
    ids=str,
)
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_ties_go_by_id(levels, fields):
    """Logits of a few values each give the reference's tokens one by one."""
    rows = examples(6)
    logits = rng(levels).integers(0, levels, (rows, 37)).astype(np.float32)
    logits[3::4, 11:] = -np.inf
    batch = batch_for(rows, 37, temperature=1.0, position=np.arange(rows), **fields)
    np.testing.assert_array_equal(
        sample_triton(logits, batch).token_ids, sampling.sample(logits, batch).token_ids
    )


def leaders(d, kept, **fields):
    """Returns the best scores among `kept`, by the reference's noise, at each position."""
    found = []
    for record in sampling_records(len(d), temperature=1.0, **fields):
        noise = gumbel(noise_words(record, d.shape[1]))
        found.append(kept[np.argmax((d[0] + noise)[kept])])
    return found


@pytest.mark.slow
def test_values_of_every_size_in_one_row():
    """Values that differ in their last bit, and others hundreds apart, are cut in their order."""
    d = np.array([[0, -1e-300, -5e-324, -1e-16, -700, -1, np.nextafter(-1, 0), -1e-3, -1, -744]])
    order = np.argsort(-d[0], kind="stable")
    for k in range(1, 11):
        rows, fields = np.repeat(d, 12, axis=0), {"position": np.arange(12)}
        kept = np.sort(order[:k])
        found = picked(rows, cuts=True, top_k=k, **fields)
        assert found.tolist() == leaders(rows, kept, **fields)


def test_a_row_draws_the_same_in_any_company():
    """A row's token has the same bits beside other rows, some of which fail."""
    case = drawn(60, 1003, 4)
    whole, order = sample_triton(case.logits, case.batch), np.array([40, 3, 17, 9, 2, 58])
    assert whole.failed[9]
    part = sample_triton(case.logits[order], taken(case.batch, order))
    np.testing.assert_array_equal(part.token_ids, whole.token_ids[order])


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 1e4])
def test_extreme_temperatures(temperature):
    """Temperatures at the ends of fp32 draw the reference's token."""
    logits, batch = random_logits(6, 50, 3), random_batch(6, 50, 3)
    batch.records["temperature"], batch.records["target_id"] = temperature, -1
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            sample_triton(logits, batch).token_ids, sampling.sample(logits, batch).token_ids
        )


def test_rows_without_weights_and_no_rows():
    """A row of which no token may be drawn gives token 0, and no rows give no tokens."""
    z = np.full((2, 7), -np.inf)
    assert picked(z).tolist() == picked(z, cuts=True, top_k=3).tolist() == [0, 0]
    assert picked(z[:0]).shape == (0,)


def test_the_best_tokens_may_be_excluded():
    """Of tokens far below an excluded one the best is drawn (XTC excludes the most likely)."""
    z = torch.full((6, 300), -30.0, dtype=torch.float64, device=DEVICE)
    z[:, 7], z[:, 250] = -torch.inf, -12.0
    records = words_of(sampling_records(6, temperature=1.0, position=np.arange(6)))
    zeros = z.new_zeros(6)
    found = TRITON.pick(z, zeros, zeros + 1, records, cuts=False)
    assert torch.equal(found, PlainKernels().pick(z, zeros, zeros + 1, records, cuts=False))
    assert found.tolist() == [250] * 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_draws_the_same(dtype):
    """The kernel draws what plain torch draws from logits of any dtype, with cuts and without."""
    g = rng(0)
    z = torch.from_numpy(3 * g.normal(size=(40, 300))).to(DEVICE, dtype)
    top, temperature = z.double().amax(dim=1), torch.from_numpy(g.uniform(0.2, 2, 40)).to(DEVICE)
    fields = {"top_k": g.integers(0, 60, 40), "top_p": g.random(40), "min_p": g.random(40) / 9}
    records = words_of(sampling_records(40, position=np.arange(40), **fields))
    for cuts in (True, False):
        plain = PlainKernels().pick(z, top, temperature, records, cuts=cuts)
        assert torch.equal(plain, TRITON.pick(z, top, temperature, records, cuts=cuts))
