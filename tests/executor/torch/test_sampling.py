"""Draws in torch against the reference sampler, whose text both follow in fp64."""

import dataclasses

import numpy as np
import pytest
import torch

from octavo.executor import noise, sampling
from octavo.executor.batch import sampling_records
from octavo.executor.torch.plain import PlainKernels
from octavo.executor.torch.sampler_ops import gumbel, noise_words, record_words
from octavo.executor.torch.sampling import (
    GREEDY,
    get_sampling_stages,
    join_results,
    make_sampling_arrays,
    sample,
)
from tests.support.draw_laws import (
    SAMPLERS,
    check_distribution,
    check_first_legal,
    check_ranks_of_ties,
)
from tests.support.sampling_cases import check, drawn, random_batch, random_logits


def sample_torch(logits, batch):
    """Draws all rows at once; fewer logits than rows are drawn from again."""
    wants = get_sampling_stages(batch, logits.shape[1])
    inputs = {
        name: torch.from_numpy(np.ascontiguousarray(array))
        for name, array in make_sampling_arrays(batch, wants).items()
    }
    rows = np.resize(logits, (len(batch), logits.shape[1]))
    return join_results([sample(torch.from_numpy(rows), inputs, wants, PlainKernels())])


@pytest.mark.parametrize(
    ("rows", "vocab", "seed"),
    [(1, 1, 1), (130, 5, 2), (65, 100, 3), (130, 1003, 4), (20, 49152, 5)],
)
def test_random_batches(rows, vocab, seed):
    """Rows with every option at once draw what the reference draws, in two parts as in one."""
    case = drawn(rows, vocab, seed)
    for part in (slice(0, rows // 2), slice(rows // 2, rows), slice(0, rows)):
        if part.stop > part.start:
            batch = case.batch.part(part.start, part.stop)
            check(case, sample_torch(case.logits[part], batch), part)


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_have_their_probabilities(name):
    """Every sampler draws from the distribution that its definition gives."""
    check_distribution(name, sample_torch)


def test_the_masked_draw_is_the_first_legal_token():
    """A mask takes the first legal token in the order of the reference's unmasked scores."""
    check_first_legal(sample_torch)


def test_a_rank_is_a_place_in_the_top_list():
    """A token's rank is its place in the top list, which orders equal logits by id."""
    check_ranks_of_ties(sample_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit_alone_is_what_a_draw_at_temperature_0_gives(dtype):
    """The greedy path agrees with the general one on equals, infinities and NaN, too."""
    logits = (torch.randn(9, 700) * 3).round().to(dtype)
    logits[2, 5], logits[3], logits[4, 7] = torch.nan, -torch.inf, torch.inf
    logits[5, 0], logits[6, 699] = -torch.inf, 40.0
    inputs = {"records": torch.from_numpy(record_words(sampling_records(9)))}
    found = sample(logits, inputs, GREEDY, PlainKernels())
    wanted = sample(logits, inputs, dataclasses.replace(GREEDY, num_top=0), PlainKernels())
    assert torch.equal(found.token_ids, wanted.token_ids)
    assert torch.equal(found.failed, wanted.failed)
    assert found.failed.nonzero()[:, 0].tolist() == [2, 3, 4] and found.token_ids[6] == 699


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 1e4])
def test_extreme_temperatures(temperature):
    """Temperatures at the ends of fp32 draw the reference's token."""
    logits, batch = random_logits(6, 50, 3), random_batch(6, 50, 3)
    batch.records["temperature"], batch.records["target_id"] = temperature, -1
    with np.errstate(all="ignore"):
        wanted = sampling.sample(logits, batch)
    np.testing.assert_array_equal(sample_torch(logits, batch).token_ids, wanted.token_ids)


def test_words_and_noise_are_the_references():
    """Every token's word is the reference's, and its noise to a rounding."""
    batch = random_batch(50, 10, 8)
    records = torch.from_numpy(record_words(batch.records))
    words = noise_words(records, 1003)
    wanted = np.stack([noise.noise_words(record, 1003) for record in batch.records])
    np.testing.assert_array_equal(words.numpy(), wanted)
    np.testing.assert_allclose(gumbel(words).numpy(), noise.gumbel(wanted), rtol=1e-13, atol=1e-14)
