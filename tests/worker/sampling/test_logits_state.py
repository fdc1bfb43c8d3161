"""What a request's options add to logits after a token that the device alone knows."""

import numpy as np
import pytest

from octavo.api.sampling_params import SamplingParams
from octavo.worker.sampling.dry import make_dry_matches
from octavo.worker.sampling.logits_state import ANY_TOKEN, LogitsState

VOCAB = 5


def extras_of(g, *, num_prompt, min_num_tokens):
    words = [g.integers(0, VOCAB, g.integers(1, 5)).tolist() for _ in range(g.integers(0, 9))]
    repeats = bool(g.integers(0, 2))
    return LogitsState(
        logit_bias={} if repeats else {1: 2.0, 3: -1.5},
        end_token_ids=[0],
        num_prompt_tokens=num_prompt,
        num_known=num_prompt,
        min_num_tokens=min_num_tokens,
        bad_words=words,
        counts=None,
        allowed_mask=None,
        dry=make_dry_matches(SamplingParams(dry_multiplier=0.8)) if repeats else None,
        processors=[],
    )


@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_is_added_once_the_token_is_known(seed):
    g = np.random.default_rng(seed)
    tokens = g.integers(0, VOCAB, 16).astype(np.int32)
    num_prompt = int(g.integers(1, 8))
    state = extras_of(g, num_prompt=num_prompt, min_num_tokens=num_prompt + 4)
    for end in range(num_prompt, len(tokens)):
        found = state.bias_after(tokens[:end])
        for last in range(VOCAB):
            known = np.append(tokens[:end], last).astype(np.int32)
            wanted = state.bias(known, state.dry and state.dry.copy(), must_end=False)
            own: dict[int, float] = {}
            for (after, token_id), value in found.items():
                if after in (ANY_TOKEN, last):
                    own[token_id] = own.get(token_id, 0.0) + value
            assert own == wanted, (end, last)


def test_a_row_lags_until_its_token_has_come_back():
    state = extras_of(np.random.default_rng(0), num_prompt=3, min_num_tokens=3)
    assert not state.lags(3) and state.lags(4)
    state.accept_token(2)
    assert not state.lags(4) and state.lags(5)
