"""The rules of timestamps leave the tokens that transformers' leave, whatever was drawn before."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from octavo.api.errors import ConfigError
from octavo.config.processors import processor_entries
from octavo.worker.sampling.logits_processors import load_processors
from octavo.worker.sampling.timestamps import TimestampRules
from tests.support.tiers import examples

END, NO_TIMESTAMPS, VOCABULARY = 40, 50, 90
PROMPT = [41, 42, 43]


def sequences(seed: int) -> list[int]:
    """Returns tokens that the rules may have led to, and some that they would not."""
    drawn = np.random.default_rng(seed)
    length = int(drawn.integers(0, 7))
    times = np.sort(drawn.integers(NO_TIMESTAMPS + 1, VOCABULARY, length))
    words = drawn.integers(0, END, length)
    return [*PROMPT, *np.where(drawn.random(length) < 0.5, times, words).tolist()]


@pytest.mark.parametrize("most", [None, 5])
def test_what_is_left_is_what_transformers_leaves(most: int | None) -> None:
    named = {"no_timestamps_token_id": NO_TIMESTAMPS, "eos_token_id": END}
    known = SimpleNamespace(**named, max_initial_timestamp_index=most)
    theirs = WhisperTimeStampLogitsProcessor(known, len(PROMPT))
    rules = TimestampRules(PROMPT[0], len(PROMPT), END, NO_TIMESTAMPS, -1 if most is None else most)
    for seed in range(examples(200)):
        ids = sequences(seed)
        logits = np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)
        wanted = theirs(torch.tensor([ids]), torch.tensor(logits[None]))[0].numpy()
        rules(np.array(ids, np.int32), logits)
        np.testing.assert_array_equal(logits, wanted, str(ids))


def test_a_text_before_counts_for_nothing() -> None:
    """Whatever goes before the token that begins the prompt's last part."""
    rules = TimestampRules(PROMPT[0], len(PROMPT), END, NO_TIMESTAMPS, 5)
    for seed in range(20):
        ids = sequences(seed)
        logits = np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)
        behind = logits.copy()
        rules(np.array(ids, np.int32), logits)
        rules(np.array([44, 3, 60, 4, *ids], np.int32), behind)
        np.testing.assert_array_equal(behind, logits)


def test_a_banned_token_counts_for_nothing() -> None:
    rules = TimestampRules(PROMPT[0], 1, END, NO_TIMESTAMPS, -1, 7)
    logits = np.zeros(VOCABULARY, np.float32)
    logits[7] = 99
    rules(np.array([41, 60, 3], np.int32), logits)
    assert logits[7] == -np.inf and logits[3] == -np.inf and logits[70] == 0


def test_a_processor_may_be_made_of_numbers() -> None:
    (entry,) = processor_entries(
        ["times=octavo.worker.sampling.timestamps:TimestampRules(2,3,40,50,-1)"]
    )
    assert entry.numbers == (2, 3, 40, 50, -1)
    assert isinstance(load_processors([entry])["times"], TimestampRules)
    wrong = processor_entries(["times=octavo.worker.sampling.timestamps:TimestampRules(3)"])
    with pytest.raises(ConfigError, match="TimestampRules cannot be imported: TypeError"):
        load_processors(wrong)
