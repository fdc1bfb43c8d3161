"""Drawing tokens in torch against the reference sampler, as native is tested: a draw's borders may
lie 1e-6 elsewhere, no more.
"""

import dataclasses

import numpy as np
import pytest
import torch

from octavo.backends import sampling
from octavo.backends.torch.plain import PlainKernels
from octavo.backends.torch.sampling import (
    GREEDY,
    draw,
    draw_arrays,
    part_of,
    result_of,
    uniforms,
    wants_of,
)
from tests.backends.native.test_sampling import check, drawn, random_batch, random_logits


def sample_torch(logits, batch):
    """In two parts, where there are rows for two."""
    cut = len(logits) // 2
    parts = []
    for rows in (slice(0, cut), slice(cut, len(logits))):
        part = part_of(batch, rows)
        wants = wants_of(part, logits.shape[1])
        inputs = {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in draw_arrays(part, wants).items()
        }
        if rows.stop > rows.start:
            parts.append(
                (part, draw(torch.from_numpy(logits[rows]), inputs, wants, PlainKernels()))
            )
    return [(part, result_of([found])) for part, found in parts]


@pytest.mark.parametrize(
    ("rows", "vocab", "seed"),
    [(1, 1, 1), (130, 5, 2), (65, 100, 3), (130, 1003, 4), (20, 49152, 5)],
)
def test_random_batches(rows, vocab, seed):
    logits, batch, wanted, tokens = drawn(rows, vocab, seed)
    start = 0
    for part, found in sample_torch(logits, batch):
        at = slice(start, start + len(part.seeds))
        with np.errstate(all="ignore"):
            check(logits[at], part, found, sampling.sample(logits[at], part), tokens[at])
        np.testing.assert_array_equal(found.failed, wanted.failed[at])
        start = at.stop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit_alone_is_what_a_draw_at_temperature_0_gives(dtype):
    """Equals, infinities and NaN too: one row that asks for a logprob takes them all the other
    way."""
    logits = (torch.randn(9, 700) * 3).round().to(dtype)
    logits[2, 5], logits[3], logits[4, 7], logits[5, 0], logits[6, 699] = (
        torch.nan,
        -torch.inf,
        torch.inf,
        -torch.inf,
        40.0,
    )
    inputs = {"target_ids": torch.full((9,), -1, dtype=torch.int32)}
    found = draw(logits, inputs, GREEDY, PlainKernels())
    wanted = draw(logits, inputs, dataclasses.replace(GREEDY, num_top=0), PlainKernels())
    assert torch.equal(found.token_ids, wanted.token_ids) and torch.equal(
        found.failed, wanted.failed
    )
    assert (
        found.failed.tolist() == [False, False, True, True, True, False, False, False, False]
        and found.token_ids[6] == 699
    )


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 1e4])
def test_extreme_temperatures(temperature):
    logits, batch = random_logits(6, 50, 3), random_batch(6, 50, 3)
    batch.temperatures[:], batch.target_ids[:] = temperature, -1
    with np.errstate(all="ignore"):
        wanted = sampling.sample(logits, batch)
    found = np.concatenate([result.token_ids for _, result in sample_torch(logits, batch)])
    np.testing.assert_array_equal(found, wanted.token_ids)


def test_the_numbers_are_philox_s():
    batch = random_batch(200, 10, 8)
    wanted = [
        sampling.uniform(int(batch.seeds[s]), int(batch.positions[s]), int(batch.sample_indices[s]))
        for s in range(200)
    ]
    np.testing.assert_array_equal(uniforms(batch), wanted)
