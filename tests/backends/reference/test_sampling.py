"""The reference sampler's text, clause by clause."""

import numpy as np
import pytest

from octavo.backends.batch import SamplingBatch
from octavo.backends.sampling import philox, sample, uniform


def rng(seed=0):
    return np.random.default_rng(seed)


def csr(rows):
    """Rows of pairs or triples as starts and columns."""
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return starts, [entry for row in rows for entry in row]


def batch_for(num_rows, vocab_size=4, *, bias=None, history=None, masks=None, **columns):
    """Greedy rows unless told otherwise; `bias` and `history` hold (id, value) pairs a row."""
    defaults = {
        "temperatures": (0.0, np.float32),
        "top_ks": (0, np.int32),
        "top_ps": (1.0, np.float32),
        "min_ps": (0.0, np.float32),
        "seeds": (1, np.uint64),
        "sample_indices": (0, np.uint32),
        "positions": (0, np.uint32),
        "target_ids": (-1, np.int32),
        "num_logprobs": (-1, np.int32),
        "repetition_penalties": (1.0, np.float32),
        "presence_penalties": (0.0, np.float32),
        "frequency_penalties": (0.0, np.float32),
        "allowed": (-1, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.array(columns.get(name, default), dtype), (num_rows,)).copy()
        for name, (default, dtype) in defaults.items()
    }
    bias_starts, bias_entries = csr(bias or [[]] * num_rows)
    history_starts, history_entries = csr(history or [[]] * num_rows)
    return SamplingBatch(
        **arrays,
        bias_starts=bias_starts,
        bias_ids=np.array([i for i, _ in bias_entries], np.int32),
        bias_values=np.array([v for _, v in bias_entries], np.float32),
        history_starts=history_starts,
        history_ids=np.array([i for i, _ in history_entries], np.int32),
        history_counts=np.array([c for _, c in history_entries], np.int32),
        allowed_masks=np.array(masks if masks is not None else np.zeros((0, vocab_size)), np.bool_),
    )


def row(*values):
    return np.array([values], np.float32)


def drawn(logits, count=4000, **columns):
    """Tokens of the same row at `count` positions."""
    logits = np.repeat(np.asarray(logits, np.float32), count, axis=0)
    return sample(
        logits,
        batch_for(
            count,
            logits.shape[1],
            temperatures=columns.pop("temperatures", 1.0),
            positions=range(count),
            **columns,
        ),
    )


def support(logits, **columns):
    return sorted(set(drawn(logits, **columns).token_ids.tolist()))


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, wanted):
    """Random123's kat_vectors, philox4x32 10."""
    assert philox(key, counter) == wanted


def test_uniform_takes_the_first_two_words():
    x0, x1, _, _ = philox((0x89ABCDEF, 0x01234567), (11, 3, 0, 0))
    u = uniform(0x0123456789ABCDEF, 11, 3)
    assert u == ((x0 << 21) | (x1 >> 11)) / 2**53
    assert 0 <= u < 1


def test_greedy_takes_the_lowest_of_equals():
    assert sample(row(1, 3, 3, 2), batch_for(1)).token_ids.tolist() == [1]


def test_draws_follow_the_softmax():
    """40,000 draws; 5 sigma of the largest share are 0.0125."""
    z = np.array([0.0, 1.0, 2.0, -1.0, 0.5])
    p = np.exp(z / 0.8) / np.exp(z / 0.8).sum()
    share = np.bincount(drawn(z[None], 40_000, temperatures=0.8).token_ids, minlength=5) / 40_000
    np.testing.assert_allclose(share, p, atol=0.0125)


def test_draws_depend_on_seed_position_and_sample_only():
    logits = np.repeat(rng().normal(size=(1, 1000)).astype(np.float32), 6, axis=0)
    columns = {
        "seeds": [5, 5, 6, 5, 5, 5],
        "positions": [1, 1, 1, 2, 1, 1],
        "sample_indices": [0, 0, 0, 0, 1, 0],
    }
    tokens = sample(logits, batch_for(6, 1000, temperatures=1.0, **columns)).token_ids.tolist()
    assert tokens[0] == tokens[1] == tokens[5]
    assert len({tokens[0], tokens[2], tokens[3], tokens[4]}) == 4
    alone = sample(logits[3:4], batch_for(1, 1000, temperatures=1.0, seeds=5, positions=2))
    assert alone.token_ids[0] == tokens[3]


def test_the_draw_is_the_inverse_of_the_running_sum():
    """By id, not by probability."""
    z = np.log([0.2, 0.5, 0.3])
    for position in range(50):
        u = uniform(9, position, 0)
        token = sample(
            z[None].astype(np.float32),
            batch_for(1, 3, temperatures=1.0, seeds=9, positions=position),
        ).token_ids[0]
        assert token == (0 if u < 0.2 else 1 if u < 0.7 else 2)


def test_top_k_takes_the_lower_of_equals():
    assert support(row(1, 2, 2, 2, 0), top_ks=2) == [1, 2]
    assert support(row(1, 2, 2, 2, 0), top_ks=9) == [0, 1, 2, 3, 4]
    assert support(row(1, 2), top_ks=1) == [1]


def test_top_p_keeps_the_shortest_beginning_that_reaches_it():
    z = np.log([[0.1, 0.5, 0.15, 0.25]])
    assert support(z, top_ps=0.49) == [1]
    assert support(z, top_ps=0.51) == [1, 3]
    assert support(z, top_ps=0.76) == [1, 2, 3]
    assert support(z, top_ps=1e-9) == [1]


def test_top_p_is_of_what_top_k_left():
    assert support(np.log([[0.4, 0.3, 0.2, 0.1]]), top_ks=2, top_ps=0.55) == [0]
    assert support(np.log([[0.4, 0.3, 0.2, 0.1]]), top_ps=0.55) == [0, 1]


def test_min_p_is_relative_to_the_most_likely():
    z = np.log([[0.5, 0.3, 0.11, 0.09]])
    assert support(z, min_ps=0.2) == [0, 1, 2]
    assert support(z, min_ps=1.0) == [0]
    assert support(z, min_ps=0.2, temperatures=0.5) == [0, 1], "after the temperature"


def test_bias_and_bans():
    assert sample(
        row(1, 2, 3, 0), batch_for(1, bias=[[(0, 2.5), (2, -np.inf)]])
    ).token_ids.tolist() == [0]
    assert support(row(0, 0, 0, 0), bias=[[(1, -np.inf), (3, -np.inf)]] * 4000) == [0, 2]


def test_allowed_tokens():
    masks = [[True, False, False, True], [False, True, False, False]]
    result = sample(
        np.repeat(row(1, 2, 3, 0), 3, axis=0), batch_for(3, masks=masks, allowed=[0, 1, -1])
    )
    assert result.token_ids.tolist() == [0, 1, 2]


def test_repetition_penalty_divides_above_zero_and_multiplies_below():
    """Prompt tokens (count 0) too."""
    history = [[(0, 0), (1, 2)]]
    assert sample(
        row(3, -0.5, 1.6, -0.9), batch_for(1, history=history, repetition_penalties=2.0)
    ).token_ids.tolist() == [2]
    assert sample(
        row(-3, -0.5, -2, -0.9), batch_for(1, history=history, repetition_penalties=2.0)
    ).token_ids.tolist() == [3]


def test_presence_and_frequency_count_generated_tokens():
    history = [[(0, 0), (1, 3), (2, 1)]]
    z = row(1.0, 4.0, 2.0, 0.0)
    assert sample(z, batch_for(1, history=history, frequency_penalties=0.6)).token_ids.tolist() == [
        1
    ]
    assert sample(z, batch_for(1, history=history, frequency_penalties=0.9)).token_ids.tolist() == [
        1
    ]
    assert sample(z, batch_for(1, history=history, frequency_penalties=1.1)).token_ids.tolist() == [
        0
    ]
    assert sample(z, batch_for(1, history=history, presence_penalties=2.0)).token_ids.tolist() == [
        1
    ]
    assert sample(
        z, batch_for(1, history=history, presence_penalties=2.0, frequency_penalties=0.5)
    ).token_ids.tolist() == [0]


def test_rows_that_fail_alone():
    logits = np.array(
        [[1, np.nan, 2], [1, 2, 3], [-np.inf] * 3, [1, 2, np.inf], [0, 0, 0]], np.float32
    )
    bias = [[], [], [], [], [(i, -np.inf) for i in range(3)]]
    result = sample(
        logits, batch_for(5, 3, bias=bias, temperatures=[0, 0, 1, 0, 1], num_logprobs=1)
    )
    assert result.failed.tolist() == [True, False, True, True, True]
    assert result.token_ids.tolist() == [0, 2, 0, 0, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = rng(1).normal(size=(3, 50)).astype(np.float32) * 3
    batch = batch_for(
        3,
        50,
        temperatures=[0, 0.3, 0],
        bias=[[(7, 90.0)], [], []],
        num_logprobs=[2, 5, -1],
        top_ks=3,
    )
    result = sample(logits, batch)
    wanted = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    assert result.token_ids[0] == 7, "the bias decides, yet its logprob is the model's"
    for s in range(2):
        token = result.token_ids[s]
        assert result.logprobs[s] == pytest.approx(wanted[s, token], rel=1e-6)
        assert result.ranks[s] == 1 + (logits[s] > logits[s, token]).sum()
        assert result.top_ids[s].tolist() == np.argsort(-logits[s])[:5].tolist()
        np.testing.assert_allclose(result.top_logprobs[s], wanted[s][result.top_ids[s]], rtol=1e-6)


def test_the_top_list_takes_the_lower_of_equals():
    result = sample(row(1, 5, 5, 5, 2), batch_for(1, num_logprobs=3, target_ids=3))
    assert result.top_ids.tolist() == [[1, 2, 3]]
    assert result.ranks.tolist() == [1]


def test_more_logprobs_than_tokens():
    assert sample(row(1, 5), batch_for(1, num_logprobs=20)).top_ids.tolist() == [[1, 0]]


def test_targets_are_not_drawn():
    logits = np.repeat(row(1, 5, 2, 0), 2, axis=0)
    logits[1, 0] = np.nan
    result = sample(logits, batch_for(2, temperatures=1.0, target_ids=[2, 2], num_logprobs=0))
    assert result.token_ids.tolist() == [2, 0] and result.failed.tolist() == [False, True]
    assert result.ranks[0] == 2
    assert result.logprobs[0] == pytest.approx(2 - np.log(np.exp([1, 5, 2, 0]).sum()), rel=1e-6)


def test_without_rows_or_logprobs():
    result = sample(np.zeros((0, 4), np.float32), batch_for(0))
    assert result.token_ids.shape == (0,) and result.logprobs is None
    assert sample(row(1, 2), batch_for(1)).logprobs is None


def test_the_logits_are_left_as_they_are():
    logits = rng().normal(size=(2, 9)).astype(np.float32)
    before = logits.copy()
    sample(
        logits,
        batch_for(
            2,
            9,
            temperatures=1.0,
            bias=[[(1, 4.0)]] * 2,
            history=[[(2, 3)]] * 2,
            repetition_penalties=1.3,
        ),
    )
    np.testing.assert_array_equal(logits, before)
