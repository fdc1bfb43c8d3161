"""Guesses are drawn with the noise of the draws that verify them: they hold more often than the
likeliest tokens, and texts that are drawn with them have their probabilities.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.protocol.step import ResultKind, ScheduledRequest
from octavo.executor.batch import sampling_records
from octavo.executor.noise import gumbel, noise_words, noise_words_for, philox
from octavo.executor.sampling import sample
from octavo.worker.sampling.draft_layout import accept_drafts
from octavo.worker.sampling.draft_sampling import DraftSampling, DraftVocabulary

ROWS, VOCAB = 300, 60
SAME_IDS = DraftVocabulary(VOCAB, VOCAB, VOCAB)


def records_of(count, **fields):
    return sampling_records(
        count, **{"seed": 7, "position": np.arange(count), "temperature": 1.0} | fields
    )


def guesses(logits, records, ids=SAME_IDS):
    """Returns what is guessed from `logits [S, V]` of a draft model for rows with `records`."""
    draws = DraftSampling(ids, records)
    samples = sample(logits, draws.make_batch())
    found = [draws.get_draft_ids(samples, entry) for entry in range(len(records))]
    assert all(len(each) <= 1 for each in found)
    return [each[0] if each else None for each in found]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_shared_noise_guesses_more_than_the_likeliest_token(temperature):
    """The draft model has the model's logits and an error of a quarter of their spread."""
    g = np.random.default_rng(3)
    logits = (2 * g.normal(size=(ROWS, VOCAB))).astype(np.float32)
    near = (logits + 0.5 * g.normal(size=logits.shape)).astype(np.float32)
    records = records_of(ROWS, temperature=temperature)
    drawn = sample(logits, DraftSampling(SAME_IDS, records).make_batch()).token_ids
    shared = np.mean(drawn == guesses(near, records))
    likeliest = np.mean(drawn == near.argmax(axis=1))
    assert shared > 0.6 and shared > 1.4 * likeliest


def test_its_own_logits_guess_every_draw_under_filters():
    """Equal logits give equal tokens, whatever filters a row has."""
    g = np.random.default_rng(4)
    logits = (2 * g.normal(size=(ROWS, VOCAB))).astype(np.float32)
    records = records_of(
        ROWS,
        temperature=g.uniform(0.2, 2, ROWS),
        top_k=g.integers(0, 30, ROWS),
        top_p=g.uniform(0.5, 1, ROWS),
        sample_index=g.integers(0, 3, ROWS),
        xtc_probability=0.5,
        xtc_threshold=0.1,
    )
    drawn = sample(logits, DraftSampling(SAME_IDS, records).make_batch()).token_ids
    assert guesses(logits, records) == drawn.tolist()


def test_a_head_with_ids_of_its_own_has_the_noise_of_the_models_ids():
    """The guess is the argmax over the head's ids of log p / T and the noise of the ids that they
    stand for; a greedy row's is the likeliest.
    """
    g = np.random.default_rng(5)
    own = 40
    ids = np.sort(g.choice(VOCAB, own, replace=False))
    logits = (2 * g.normal(size=(ROWS, own))).astype(np.float32)
    records = records_of(ROWS, temperature=np.where(np.arange(ROWS) % 3, 0.8, 0.0))
    found = guesses(logits, records, DraftVocabulary(VOCAB, own, VOCAB, ids - np.arange(own)))
    for row, record, guess in zip(logits, records, found, strict=True):
        noise = gumbel(noise_words(record, VOCAB))[ids] if record["temperature"] else np.zeros(own)
        assert guess == ids[np.argmax(row / (record["temperature"] or 1) + noise)]


def test_an_id_that_the_model_has_not_is_no_guess():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, VOCAB - 1] = 9
    assert guesses(
        logits, records_of(1, temperature=0), DraftVocabulary(VOCAB, VOCAB, VOCAB - 1)
    ) == [None]


@pytest.mark.parametrize("has_own_ids", [False, True])
def test_the_next_guesses_are_what_is_drawn_without_those_before(has_own_ids):
    """Each draw tells three tokens: the drawn one, what would be drawn were it banned, and what
    would be drawn without both.
    """
    g = np.random.default_rng(8)
    logits = (2 * g.normal(size=(ROWS, VOCAB))).astype(np.float32)
    records = records_of(ROWS, temperature=np.where(np.arange(ROWS) % 3, 0.9, 0.0))
    ids = (
        DraftVocabulary(VOCAB, VOCAB, VOCAB, np.zeros(VOCAB, np.int64)) if has_own_ids else SAME_IDS
    )
    draws = DraftSampling(ids, records, width=3)
    samples = sample(logits, draws.make_batch())
    found = np.array([draws.get_draft_ids(samples, entry) for entry in range(ROWS)])
    for rank in range(3):
        drawn = sample(logits, DraftSampling(SAME_IDS, records).make_batch()).token_ids
        np.testing.assert_array_equal(found[:, rank], drawn)
        logits[np.arange(ROWS), drawn] = -np.inf


def test_the_words_of_some_tokens_are_those_of_all():
    record = records_of(3, sample_index=2)[1]
    some = np.array([17, 3, 8, 59, 0])
    np.testing.assert_array_equal(noise_words_for(record, some), noise_words(record, VOCAB)[some])


# -- texts drawn with guesses --

TOKENS, LENGTH, TEXTS = 8, 3, 66_667
"""Texts of three tokens of eight; 200,000 draws."""


def noise_of(position):
    """Returns the noise of each text's draw at a position, `[TEXTS, TOKENS]`: seeds are counted."""
    seeds = np.arange(TEXTS)[:, None]
    words = philox((seeds, 0), (position, 0, np.arange(TOKENS // 4)[None], 0))
    return gumbel(np.stack(words, axis=2).reshape(TEXTS, TOKENS))


@pytest.mark.parametrize("error", [0.3, 3.0], ids=["good guesses", "bad guesses"])
def test_texts_with_guesses_have_their_probabilities(error):
    """Each token's probabilities depend on all tokens before it. Texts are drawn as a step with
    guesses draws them, going on behind the first guess that fails; 511 degrees of freedom exceed
    640 once in 10,000.
    """
    g = np.random.default_rng(6)
    tables = [g.normal(size=(TOKENS,) * depth + (TOKENS,)) for depth in range(LENGTH)]
    drafts = [table + error * g.normal(size=table.shape) for table in tables]
    noises = [noise_of(position) for position in range(LENGTH)]

    def drawn(model, texts):
        return np.argmax(model[len(texts)][tuple(texts)] + noises[len(texts)], axis=1)

    guessed, target = [], []
    for _ in range(LENGTH):
        target.append(drawn(tables, guessed))
        guessed.append(drawn(drafts, guessed))
    texts, num_held = [], 0
    plain = []
    for _ in range(LENGTH):
        plain.append(drawn(tables, plain))
    for text in range(TEXTS):
        row = ScheduledRequest(
            "r",
            0,
            3,
            [],
            result_kind=ResultKind.SAMPLE,
            draft_ids=[int(guessed[0][text]), int(guessed[1][text])],
        )
        owners = [0] * (len(row.draft_ids) + 1)
        tokens = [int(each[text]) for each in target]
        kept = [tokens[at] for at in accept_drafts([row], owners, tokens, [False] * LENGTH).entries]
        num_held += len(kept) - 1
        # What a later step draws behind them follows the same rule, without guesses.
        texts.append(kept + [int(each[text]) for each in plain[len(kept) :]])
    found = np.array(texts)
    np.testing.assert_array_equal(found, np.stack(plain, axis=1))
    assert num_held > (1.2 if error < 1 else 0.1) * TEXTS
    shares = np.ones(())
    for table in tables:
        exponents = np.exp(table)
        shares = shares[..., None] * exponents / exponents.sum(axis=-1, keepdims=True)
    counts = np.zeros((TOKENS,) * LENGTH)
    np.add.at(counts, tuple(found.T), 1)
    expected = TEXTS * shares
    assert float(((counts - expected) ** 2 / expected).sum()) < 640
