"""The reference sampler, clause by clause of its text."""

import numpy as np
import pytest

from octavo.executor import sampling
from octavo.executor.batch import SAMPLING_RECORD, sampling_records
from octavo.executor.noise import gumbel, noise_words, philox
from octavo.executor.sampling import sample
from tests.support.draw_laws import (
    SAMPLERS,
    check_cutoff_proofs,
    check_distribution,
    check_first_legal,
    check_masked_distribution,
    check_ranks_of_ties,
)
from tests.support.sampling_cases import batch_for, rng


def row(*values):
    return np.array([values], np.float32)


def repeated(logits, batch):
    """Draws every row of the batch from the same logits."""
    return sample(np.repeat(logits, len(batch), axis=0), batch)


def drawn(logits, count=2000, **fields):
    """Draws from one row of logits at `count` positions."""
    logits = np.asarray(logits, np.float32)
    fields = {"temperature": 1.0, "position": np.arange(count)} | fields
    return repeated(logits, batch_for(count, logits.shape[1], **fields))


def support(logits, **fields):
    return sorted(set(drawn(logits, **fields).token_ids.tolist()))


# -- noise --


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
    """Philox4x32-10 agrees with Random123's known answers."""
    assert philox(key, counter) == wanted


def test_a_tokens_word_is_one_of_its_quads_block():
    """Token t has word t % 4 of the block at (position, sample, t // 4, purpose)."""
    record = sampling_records(1, seed=0x0123456789ABCDEF, position=11, sample_index=3)[0]
    words = noise_words(record, 10, purpose=1)
    for token in range(10):
        block = philox((0x89ABCDEF, 0x01234567), (11, 3, token // 4, 1))
        assert words[token] == block[token % 4]


def test_noise_is_finite_at_both_ends():
    """The extreme words give the noise's stated bounds, and its formula is one curve."""
    words = np.array([0, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000], np.uint64)
    found = gumbel(words)
    np.testing.assert_allclose(found[:2], [-3.1299946, 22.8738570], rtol=1e-7)
    np.testing.assert_allclose(found[2:], -np.log(np.log(2)), rtol=1e-8)


COUNTERS = {
    "tokens": lambda: noise_words(record_at(), 1 << 16),
    "positions": lambda: words_over(position=np.arange(1 << 14)),
    "samples": lambda: words_over(sample_index=np.arange(1 << 14)),
    "seeds": lambda: words_over(seed=np.arange(1 << 14)),
    "purposes": lambda: words_over(purpose=np.arange(1 << 14)),
}


def record_at(**fields):
    return sampling_records(1, **{"seed": 42, "position": 5} | fields)[0]


def words_over(purpose=0, **fields):
    """Returns the first words over a range of one field, by the formula for all of them at once."""
    values = {"seed": 42, "position": 5, "sample_index": 0} | fields
    counter = (values["position"], values["sample_index"], 0, purpose)
    return np.concatenate(philox((values["seed"], 0), counter))


def chi_square(counts):
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("shift", [26, 0], ids=["high bits", "low bits"])
@pytest.mark.parametrize("over", COUNTERS)
def test_noise_is_uniform(over, shift):
    """64 cells of 65,536 words; 63 degrees of freedom exceed 117 once in 30,000."""
    cells = (COUNTERS[over]() >> np.uint64(shift)) & np.uint64(63)
    assert chi_square(np.bincount(cells.astype(int), minlength=64)) < 117


@pytest.mark.parametrize(
    "changed",
    [{"position": 6}, {"sample_index": 1}, {"seed": 43}, {"purpose": 1}, {"token": 1}],
    ids=str,
)
def test_noise_is_independent(changed):
    """Words of a counter tell nothing of those of its neighbour, in 16 by 16 cells.

    255 degrees of freedom exceed 350 once in 15,000.
    """
    num = 1 << 16
    shift, purpose = changed.pop("token", 0), changed.pop("purpose", 0)
    one = noise_words(record_at(), num + shift)[:num]
    other = noise_words(record_at(**changed), num + shift, purpose=purpose)[shift:]
    cells = (one >> np.uint64(28)) * 16 + (other >> np.uint64(28))
    assert chi_square(np.bincount(cells.astype(int), minlength=256)) < 350
    assert (one == other).mean() < 1e-3


# -- draws --


def test_greedy_takes_the_lowest_of_equals():
    """Equal logits go to the lowest id at temperature 0."""
    assert sample(row(1, 3, 3, 2), batch_for(1)).token_ids.tolist() == [1]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_have_their_probabilities(name):
    """Every sampler draws from the distribution that its definition gives."""
    check_distribution(name, repeated)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("vocab", [5, 8, 13, 20])
def test_masked_draws_have_the_legal_tokens_shares(vocab):
    """A mask leaves the legal tokens their shares among themselves."""
    check_masked_distribution(repeated, vocab)


def test_draws_depend_on_seed_position_and_sample_only():
    """Rows with equal seed, position and sample draw the same token, wherever they are."""
    logits = np.repeat(rng().normal(size=(1, 1000)).astype(np.float32), 6, axis=0)
    fields = {
        "seed": [5, 5, 6, 5, 5, 5],
        "position": [1, 1, 1, 2, 1, 1],
        "sample_index": [0, 0, 0, 0, 1, 0],
    }
    tokens = sample(logits, batch_for(6, 1000, temperature=1.0, **fields)).token_ids.tolist()
    assert tokens[0] == tokens[1] == tokens[5]
    assert len({tokens[0], tokens[2], tokens[3], tokens[4]}) == 4
    alone = sample(logits[3:4], batch_for(1, 1000, temperature=1.0, seed=5, position=2))
    assert alone.token_ids[0] == tokens[3]


def test_the_draw_has_the_largest_score():
    """The token is the argmax of z / T plus Gumbel noise, by the formula written out."""
    z, words = np.log([0.2, 0.5, 0.3]), 2.0**32
    for position in range(50):
        block = philox((9, 0), (position, 0, 0, 0))
        u = (np.array(block[:3], np.float64) + 0.5) / words
        batch = batch_for(1, 3, temperature=0.8, seed=9, position=position)
        token = sample(z[None].astype(np.float32), batch).token_ids[0]
        assert token == np.argmax(z / 0.8 - np.log(-np.log(u)))


def test_the_masked_draw_is_the_first_legal_token():
    """A mask takes the best score among the tokens that it allows."""
    check_first_legal(sample)


@pytest.mark.parametrize("vocab", [3, 20, 120])
def test_witnesses_show_that_cuts_keep_a_draw(vocab):
    """A draw without cuts whose proofs are legal is the masked draw with them."""
    check_cutoff_proofs(sample, vocab=vocab)


def test_top_k_takes_the_lower_of_equals():
    """Tokens of equal logits count by their ids for top_k."""
    assert support(row(1, 2, 2, 2, 0), top_k=2) == [1, 2]
    assert support(row(1, 2, 2, 2, 0), top_k=9) == [0, 1, 2, 3, 4]
    assert support(row(1, 2), top_k=1) == [1]


def test_top_p_keeps_the_shortest_beginning_that_reaches_it():
    """The token that reaches top_p is kept, and no later one."""
    z = np.log([[0.1, 0.5, 0.15, 0.25]])
    assert support(z, top_p=0.49) == [1]
    assert support(z, top_p=0.51) == [1, 3]
    assert support(z, top_p=0.76) == [1, 2, 3]
    assert support(z, top_p=1e-9) == [1]


def test_top_p_is_of_what_top_k_left():
    """top_p counts the mass of the tokens that top_k keeps."""
    assert support(np.log([[0.4, 0.3, 0.2, 0.1]]), top_k=2, top_p=0.55) == [0]
    assert support(np.log([[0.4, 0.3, 0.2, 0.1]]), top_p=0.55) == [0, 1]


def test_min_p_is_relative_to_the_most_likely():
    """min_p is a share of the largest probability, after the temperature."""
    z = np.log([[0.5, 0.3, 0.11, 0.09]])
    assert support(z, min_p=0.2) == [0, 1, 2]
    assert support(z, min_p=1.0) == [0]
    assert support(z, min_p=0.2, temperature=0.5) == [0, 1]


def test_bias_and_bans():
    """A bias is added to a logit, and minus infinity bans the token."""
    biased = batch_for(1, bias=[[(0, 2.5), (2, -np.inf)]])
    assert sample(row(1, 2, 3, 0), biased).token_ids.tolist() == [0]
    banned = batch_for(
        500, bias=[[(1, -np.inf), (3, -np.inf)]] * 500, temperature=1.0, position=np.arange(500)
    )
    assert set(repeated(row(0, 0, 0, 0), banned).token_ids.tolist()) == {0, 2}


def test_allowed_tokens():
    """A row's mask is the one that its record names."""
    masks = [[True, False, False, True], [False, True, False, False]]
    batch = batch_for(3, masks=masks, allowed_mask=[0, 1, -1])
    assert repeated(row(1, 2, 3, 0), batch).token_ids.tolist() == [0, 1, 2]


def test_repetition_penalty_divides_above_zero_and_multiplies_below():
    """Tokens of the prompt (count 0) are penalised too."""
    batch = batch_for(1, history=[[(0, 0), (1, 2)]], repetition_penalty=2.0)
    assert sample(row(3, -0.5, 1.6, -0.9), batch).token_ids.tolist() == [2]
    assert sample(row(-3, -0.5, -2, -0.9), batch).token_ids.tolist() == [3]


@pytest.mark.parametrize(
    ("frequency", "presence", "token"),
    [(0.6, 0, 1), (0.9, 0, 1), (1.1, 0, 0), (0, 2.0, 1), (0.5, 2.0, 0)],
)
def test_presence_and_frequency_count_generated_tokens(frequency, presence, token):
    """A frequency penalty counts each generation, a presence penalty once."""
    batch = batch_for(
        1,
        history=[[(0, 0), (1, 3), (2, 1)]],
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    assert sample(row(1.0, 4.0, 2.0, 0.0), batch).token_ids.tolist() == [token]


def test_rows_that_fail_alone():
    """A row without a finite maximum, or with a NaN, fails and leaves the others be."""
    logits = np.array(
        [[1, np.nan, 2], [1, 2, 3], [-np.inf] * 3, [1, 2, np.inf], [0, 0, 0]], np.float32
    )
    bias = [[], [], [], [], [(i, -np.inf) for i in range(3)]]
    result = sample(logits, batch_for(5, 3, bias=bias, temperature=[0, 0, 1, 0, 1], num_logprobs=1))
    assert result.failed.tolist() == [True, False, True, True, True]
    assert result.token_ids.tolist() == [0, 2, 0, 0, 0]


# -- logprobs --


def test_logprobs_are_of_the_raw_logits():
    """Logprobs and top lists ignore bias, temperature and cuts."""
    logits = rng(1).normal(size=(3, 50)).astype(np.float32) * 3
    batch = batch_for(
        3,
        50,
        temperature=[0, 0.3, 0],
        bias=[[(7, 90.0)], [], []],
        num_logprobs=[2, 5, -1],
        top_k=3,
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


def test_a_rank_is_a_place_in_the_top_list():
    """A token's rank is its place in the top list, which orders equal logits by id."""
    check_ranks_of_ties(sample)


def test_more_logprobs_than_tokens():
    """The top list is at most the vocabulary."""
    assert sample(row(1, 5), batch_for(1, num_logprobs=20)).top_ids.tolist() == [[1, 0]]


def test_targets_are_not_drawn():
    """A target is the row's token, with its logprob and rank, whatever the temperature."""
    logits = np.repeat(row(1, 5, 2, 0), 2, axis=0)
    logits[1, 0] = np.nan
    result = sample(logits, batch_for(2, temperature=1.0, target_id=[2, 2], num_logprobs=0))
    assert result.token_ids.tolist() == [2, 0] and result.failed.tolist() == [False, True]
    assert result.ranks[0] == 2
    assert result.logprobs[0] == pytest.approx(2 - np.log(np.exp([1, 5, 2, 0]).sum()), rel=1e-6)


def test_without_rows_or_logprobs():
    """A step without draws has an empty result, and one without logprobs has none."""
    result = sample(np.zeros((0, 4), np.float32), batch_for(0))
    assert result.token_ids.shape == (0,) and result.logprobs is None
    assert sample(row(1, 2), batch_for(1)).logprobs is None


def test_the_logits_are_left_as_they_are():
    """Sampling never writes to the logits."""
    logits = rng().normal(size=(2, 9)).astype(np.float32)
    before = logits.copy()
    batch = batch_for(
        2,
        9,
        temperature=1.0,
        bias=[[(1, 4.0)]] * 2,
        history=[[(2, 3)]] * 2,
        repetition_penalty=1.3,
    )
    sample(logits, batch)
    np.testing.assert_array_equal(logits, before)


def test_neutral_records_change_nothing():
    """A record without fields is greedy, and each field holds what it is given."""
    neutral = sampling_records(2, top_k=[3, 4])
    assert neutral.dtype == SAMPLING_RECORD and neutral["top_k"].tolist() == [3, 4]
    batch = batch_for(1, history=[[(0, 1)]])
    raw = np.array([1.0, 2.0])
    np.testing.assert_array_equal(sampling.changed_logits(raw, 0, batch), raw)
