"""SamplingParams takes what it can honour, and refuses everything else by name."""

import math

import pytest

from octavo import SamplingParams
from octavo.engine.front.input_processor import prompt_list
from octavo.errors import InvalidRequest

REFUSED = [
    ({"stop": 5}, "stop: got 5, allowed is one text or a list of texts"),
    ({"stop": [5]}, "stop: got 5"),
    (
        {"stop": ("a", "")},
        "stop: got '', allowed is one text or a list of texts, none of them empty",
    ),
    ({"stop_token_ids": 5}, "stop_token_ids: got 5, allowed is a list of token ids"),
    ({"stop_token_ids": "ab"}, "stop_token_ids: got 'ab', allowed is a list of token ids"),
    ({"allowed_token_ids": {3}}, r"allowed_token_ids: got \{3\}, allowed is a list of token ids"),
    ({"bad_words": "abc"}, "bad_words: got 'abc', allowed is a list of texts"),
    ({"logit_bias": [1]}, r"logit_bias: got \[1\], allowed is numbers by token id"),
    ({"logit_bias": {1: "x"}}, "logit_bias: got 'x', allowed is a number for token id 1"),
    ({"logit_bias": {1: math.nan}}, "logit_bias: got nan, allowed is a number for token id 1"),
    ({"logit_bias": {"one": 1}}, "logit_bias: got the key 'one', allowed are token ids"),
    ({"ignore_eos": "x"}, "ignore_eos: got 'x', allowed is True or False"),
    ({"detokenize": 1}, "detokenize: got 1, allowed is True or False"),
    ({"n": True}, "n: got True"),
    ({"max_tokens": 2.0}, "max_tokens: got 2.0"),
    ({"temperature": None}, "temperature: got None"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        SamplingParams(**fields)
    assert error.value.param == next(iter(fields))


def test_what_means_the_same():
    params = SamplingParams(
        stop="a",
        seed=-1,
        top_k=-1,
        logprobs=True,
        stop_token_ids=[3, 3],
        logit_bias={"4": 1000, 5: -1000},
    )
    assert (params.stop_strings, params.seed, params.top_k, params.logprobs) == (["a"], None, 0, 1)
    assert params.stop_token_ids == [3] and params.logit_bias == {4: 100.0, 5: -100.0}
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]


def test_one_prompt_or_several():
    assert (
        prompt_list("a") == ["a"]
        and prompt_list([1, 2]) == [[1, 2]]
        and prompt_list(["a", [1]]) == ["a", [1]]
    )
    assert prompt_list({"prompt": "a"}) == [{"prompt": "a"}] and prompt_list([]) == []
    with pytest.raises(InvalidRequest, match="prompts: got int, allowed are a text"):
        prompt_list(5)
