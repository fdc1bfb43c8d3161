"""DRY's penalties against a plain reading of their definition, and within time."""

import itertools
import time
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import SamplingParams
from octavo.frontend.params_resolver import DrySequenceBreakers
from octavo.worker.sampling.dry import make_dry_matches
from tests.support.llm_tools import make_llm, prompts_of
from tests.support.tiny_models import tiny_model


def by_definition(tokens, *, allowed, last_n, breakers, multiplier, base):
    """Returns the penalties by comparing the text before every place with the end."""
    tokens = tokens if last_n == -1 else tokens[max(0, len(tokens) - last_n) :]
    longest = {}
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place:
            one = tokens[place - length]
            if one != tokens[len(tokens) - 1 - length] or one in breakers:
                break
            length += 1
        follower = tokens[place + 1]
        if length >= allowed and follower not in breakers:
            longest[follower] = max(length, longest.get(follower, 0))
    return {one: multiplier * base ** (length - allowed) for one, length in longest.items()}


def matches_of(breakers=(), **fields):
    return make_dry_matches(
        SamplingParams(dry_sequence_breaker_ids=list(breakers), **{"dry_multiplier": 0.8} | fields)
    )


@pytest.mark.parametrize("seed", range(40))
def test_penalties_are_those_of_the_definition(seed):
    """Step by step, from the start and after a rollback the penalties are the definition's."""
    g = np.random.default_rng(seed)
    tokens = g.integers(0, g.integers(1, 5), 60).astype(np.int32)
    breakers = set(g.integers(0, 5, g.integers(0, 2)).tolist())
    allowed, last_n = int(g.integers(1, 5)), int(g.choice([-1, 1, 2, 7, 30, 100]))
    matches = matches_of(breakers, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    rule = {"allowed": allowed, "last_n": last_n, "breakers": breakers}
    for end in [*range(1, 40), 39, 20, 21, 22, 60]:
        wanted = by_definition(tokens[:end].tolist(), **rule, multiplier=0.8, base=1.75)
        found = matches.penalties(tokens[:end])
        assert found.keys() == wanted.keys(), end
        assert all(np.isclose(found[one], wanted[one]) for one in wanted)


@pytest.mark.parametrize("seed", range(20))
def test_penalties_after_a_token_that_is_not_known(seed):
    """They are those after each token that it may be."""
    g = np.random.default_rng(seed)
    tokens = g.integers(0, g.integers(1, 5), 40).astype(np.int32)
    breakers = set(g.integers(0, 5, g.integers(0, 2)).tolist())
    allowed, last_n = int(g.integers(1, 4)), int(g.choice([-1, 1, 2, 7, 30, 100]))
    fields = {"dry_allowed_length": allowed, "dry_penalty_last_n": last_n}
    matches = matches_of(breakers, **fields)
    assert matches.penalties_after(tokens[:0]) == {}
    for end in [*range(1, 30), 20, 21, 40]:
        found = matches.penalties_after(tokens[:end])
        assert {last for last, _ in found} <= set(tokens[:end].tolist())
        for last in range(6):
            known = np.append(tokens[:end], last).astype(np.int32)
            own = {one: lost for (after, one), lost in found.items() if after == last}
            assert own == matches_of(breakers, **fields).penalties(known), (end, last)


def test_equal_tokens_take_linear_time_and_a_finite_penalty():
    """A hundred thousand equal tokens are read in well under a second, and a step in far less."""
    tokens = np.full(100_001, 7, np.int32)
    matches = matches_of(dry_base=100)
    began = time.thread_time()
    assert matches.penalties(tokens[:-1]) == {7: 1e30}
    middle = time.thread_time()
    assert matches.penalties(tokens) == {7: 1e30}
    assert middle - began < 1.0 and time.thread_time() - middle < 0.1


def test_without_a_multiplier_or_tokens_to_look_at_there_is_no_dry():
    """DRY that is off keeps nothing for the row."""
    assert matches_of(dry_multiplier=0) is None
    assert matches_of(dry_penalty_last_n=0) is None


def test_breakers_are_the_tokens_that_hold_one_of_the_texts():
    """The front turns texts into the tokens whose bytes hold one; no text without a tokenizer."""
    texts = [b"a", b"\n", b"b:\n", b"", b'say "', "ü*".encode()]
    tokenizer = Mock(token_bytes=texts.__getitem__)
    breakers = DrySequenceBreakers(tokenizer, len(texts))
    assert breakers.ids(None) == [1, 2, 4, 5]
    assert breakers.ids(["ü", "a", "a"]) == [0, 4, 5]
    assert breakers.ids([]) == []
    assert DrySequenceBreakers(None, 6).ids(None) == []
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers: strings require a tokenizer"):
        DrySequenceBreakers(None, 6).ids(["a"])


def test_an_answer_does_not_go_on_with_a_repetition():
    """No pair of tokens comes twice where each would cost 20, in any company; a token that is
    pushed by less than a long repetition costs gives way to others.
    """
    prompts = prompts_of(20, 33)
    dry = SamplingParams(
        temperature=0,
        max_tokens=60,
        ignore_eos=True,
        dry_multiplier=20,
        dry_base=2,
        dry_allowed_length=1,
    )
    pushed = replace(dry, logit_bias={7: 100})
    with make_llm(model_path=tiny_model("llama").path, max_model_len=128) as llm:
        together = [out.outputs[0].token_ids for out in llm.generate(prompts, dry)]
        assert together == [llm.generate(one, dry)[0].outputs[0].token_ids for one in prompts]
        free = llm.generate(prompts[0], replace(pushed, dry_multiplier=0))[0].outputs[0].token_ids
        held = llm.generate(prompts[0], pushed)[0].outputs[0].token_ids
    assert not any(map(num_repeated_pairs, prompts, together))
    assert free == [7] * 60
    assert held[:3] == [7] * 3 and set(held) != {7}


def num_repeated_pairs(prompt, answer):
    pairs = list(itertools.pairwise([*prompt, *answer]))
    return len(pairs) - len(set(pairs))
