"""Triton's draw without a sort, in its interpreter, against the reference sampler: the same tokens
wherever no tie lies within rounding.
"""

import numpy as np
import pytest
import torch

from octavo.backends import sampling
from octavo.backends.torch.plain import Cuts, PlainKernels
from octavo.backends.torch.sampling import draw, draw_arrays, result_of, wants_of
from octavo.backends.torch.triton import pick
from octavo.backends.torch.triton.device import device_name
from octavo.backends.torch.triton.kernels import TritonKernels
from tests.backends.native.test_sampling import check, drawn, random_batch, random_logits, taken
from tests.backends.torch.triton.device import DEVICE

TRITON = TritonKernels(DEVICE)


def sample_triton(logits, batch):
    wants = wants_of(batch, logits.shape[1])
    inputs = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
        for name, array in draw_arrays(batch, wants).items()
    }
    return result_of([draw(torch.from_numpy(logits).to(DEVICE), inputs, wants, TRITON)])


def picked(z, weights, points, top_k=None, top_p=1.0):
    """The kernel's tokens, for rows that are all cut alike."""
    z, weights, points = (torch.from_numpy(array).to(DEVICE) for array in (z, weights, points))
    cuts = Cuts(None, None)
    if top_k is not None:
        cuts = Cuts(
            torch.full((len(z),), top_k, dtype=torch.int32, device=DEVICE),
            torch.full((len(z),), top_p, device=DEVICE),
        )
    return pick.pick(z, weights, points, cuts, device_name(DEVICE)).cpu().numpy()


def middles(weights):
    """Points in [0, 1) in the middle of each token's share."""
    sums = np.cumsum(weights) / weights.sum()
    return (np.concatenate([[0], sums[:-1]]) + sums) / 2


@pytest.mark.parametrize(
    ("rows", "vocab", "seed"), [(1, 1, 1), (60, 5, 2), (65, 100, 3), (60, 1003, 4), (5, 49152, 5)]
)
def test_random_batches(rows, vocab, seed):
    logits, batch, wanted, tokens = drawn(rows, vocab, seed)
    found = sample_triton(logits, batch)
    with np.errstate(all="ignore"):
        check(logits, batch, found, wanted, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 230))
def test_more_random_batches(seed):
    vocab = int(np.random.default_rng(seed).choice([2, 3, 17, 64, 300, 2000, 5000]))
    logits, batch, wanted, tokens = drawn(130, vocab, seed)
    with np.errstate(all="ignore"):
        check(logits, batch, sample_triton(logits, batch), wanted, tokens)


def drawing(rows, vocab, seed, **columns):
    """Every row draws, with these columns and no other wish."""
    batch = random_batch(rows, vocab, seed)
    plain = {
        "temperatures": 1.0,
        "top_ks": 0,
        "top_ps": 1.0,
        "min_ps": 0.0,
        "target_ids": -1,
        "num_logprobs": -1,
        "allowed": -1,
    }
    for name, value in (plain | columns).items():
        getattr(batch, name)[:] = value
    batch.bias_starts[:], batch.history_starts[:] = 0, 0
    batch.bias_ids, batch.bias_values = batch.bias_ids[:0], batch.bias_values[:0]
    batch.history_ids, batch.history_counts = batch.history_ids[:0], batch.history_counts[:0]
    return batch


@pytest.mark.parametrize(
    "columns",
    [
        {"top_ks": 1},
        {"top_ks": 2},
        {"top_ks": 7},
        {"top_ks": 1000},
        {"top_ps": 0.5},
        {"top_ps": 1e-9},
        {"top_ps": 0.999},
        {"top_ks": 6, "top_ps": 0.7},
        {"min_ps": 1.0},
        {"min_ps": 0.4, "top_ks": 3, "top_ps": 0.6},
    ],
    ids=str,
)
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_ties_go_by_id(levels, columns):
    """Logits of a few values each: equal to the reference, token by token."""
    rng = np.random.default_rng(levels)
    logits = rng.integers(0, levels, (24, 37)).astype(np.float32)
    logits[3::4, 11:] = -np.inf
    batch = drawing(24, 37, 9, **columns)
    np.testing.assert_array_equal(
        sample_triton(logits, batch).token_ids, sampling.sample(logits, batch).token_ids
    )


def test_what_is_kept_is_what_the_reference_keeps():
    """Of every row, drawing in the middle of each kept token's share."""
    logits, batch = random_logits(6, 90, 8), drawing(6, 90, 8, top_ks=20, top_ps=0.8)
    for s in range(6):
        z = logits[s].astype(np.float64)
        weights = np.exp(z - z.max())
        kept = sampling._kept(z, weights, s, batch)
        rows = np.repeat(np.stack([z, weights])[:, None], len(kept), axis=1)
        np.testing.assert_array_equal(
            picked(rows[0], rows[1], middles(weights[kept]), 20, 0.8), kept
        )


def test_values_of_every_size_in_one_row():
    """Neighbours that differ in their last bit, and values hundreds apart."""
    z = np.array(
        [[0.0, 1e-300, 5e-324, -1e-16, -700.0, 1.0, np.nextafter(1.0, 2), -1e-3, 1.0, -744.0]]
    )
    weights = np.exp(z - z.max())
    order = np.argsort(-z[0], kind="stable")
    for k in range(1, 11):
        kept = np.sort(order[:k])
        found = picked(
            np.repeat(z, k, axis=0), np.repeat(weights, k, axis=0), middles(weights[0, kept]), k
        )
        assert set(found.tolist()) <= set(kept.tolist())
        large = weights[0, kept] > 1e-12
        np.testing.assert_array_equal(found[large], kept[large])


def test_a_row_draws_the_same_in_any_company():
    """Bitwise; beside rows that fail."""
    logits, batch, _, _ = drawn(60, 1003, 4)
    whole, order = sample_triton(logits, batch), np.array([40, 3, 17, 9, 2, 58])
    assert whole.failed[9]
    np.testing.assert_array_equal(
        sample_triton(logits[order], taken(batch, order)).token_ids, whole.token_ids[order]
    )


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 1e4])
def test_extreme_temperatures(temperature):
    logits, batch = random_logits(6, 50, 3), random_batch(6, 50, 3)
    batch.temperatures[:], batch.target_ids[:] = temperature, -1
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            sample_triton(logits, batch).token_ids, sampling.sample(logits, batch).token_ids
        )


def test_rows_without_weights_and_no_rows():
    z, weights = np.full((2, 7), -np.inf), np.zeros((2, 7))
    assert (
        picked(z, weights, np.zeros(2)).tolist()
        == picked(z, weights, np.zeros(2), 3).tolist()
        == [0, 0]
    )
    assert picked(z[:0], weights[:0], np.zeros(0)).shape == (0,)


def test_plain_draws_the_same():
    rng = np.random.default_rng(0)
    z = torch.from_numpy(3 * rng.normal(size=(40, 300))).to(DEVICE)
    weights = torch.exp(z - z.amax(dim=1, keepdim=True))
    points = torch.from_numpy(rng.random(40)).to(DEVICE)
    ks, ps = (
        torch.from_numpy(rng.integers(0, 60, 40).astype(np.int32)).to(DEVICE),
        torch.from_numpy(rng.random(40).astype(np.float32)).to(DEVICE),
    )
    for cuts in (Cuts(ks, ps), Cuts(None, None)):
        assert torch.equal(
            PlainKernels().pick(z, weights, points, cuts), TRITON.pick(z, weights, points, cuts)
        )
