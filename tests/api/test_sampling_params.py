"""SamplingParams takes what it can honour, and refuses everything else by name."""

import math

import msgspec
import numpy as np
import pytest

from octavo import BeamSearchParams, SamplingParams
from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import OPTIONS

REFUSED = [
    ({"stop": 5}, "stop: got 5, expected a string or a list of strings"),
    ({"stop": [5]}, "stop: got 5"),
    (
        {"stop": ("a", "")},
        "stop: got '', expected a string or a list of strings, none of them empty",
    ),
    ({"stop_regex": 5}, "stop_regex: got 5, expected a regular expression or a list of them"),
    ({"stop_regex": ["a", ""]}, "stop_regex: got '', expected a regular expression or a list"),
    ({"stop_regex": ["a"] * 17}, "stop_regex: got 17 patterns, expected at most 16"),
    ({"stop_regex": "a" * 513}, "stop_regex: got .* expected at most 512 characters, not 513"),
    ({"stop_regex": "a+"}, r"stop_regex: got 'a\+', .* matches have at most 256 characters"),
    ({"stop_regex": "(a{16}){17}"}, "stop_regex: got .* matches have at most 256 characters"),
    ({"stop_regex": "a{1,99999}"}, r"stop_regex: got 'a\{1,99999\}', expected RE2's notation"),
    ({"stop_regex": "(?=a)b"}, "stop_regex: got .* expected RE2's notation"),
    ({"stop_regex": r"(a)\1"}, "stop_regex: got .* expected RE2's notation"),
    ({"stop_regex": "("}, r"stop_regex: got '\(', expected RE2's notation"),
    (
        {"stop_regex": "a?"},
        r"stop_regex: got 'a\?', expected a pattern that does not match the empty",
    ),
    (
        {"stop_regex": "$"},
        r"stop_regex: got '\$', expected a pattern that does not match the empty string",
    ),
    ({"stop_regex": "[[:alpha:]]"}, "stop_regex: got .* without"),
    (
        {"stop_regex": r"\pL"},
        "stop_regex: got .* expected a syntax that both Python and RE2 support",
    ),
    ({"stop_regex": "\ud800"}, "stop_regex: got .* expected valid Unicode"),
    ({"stop_regex": "a", "detokenize": False}, "stop_regex: stop strings require detokenize"),
    ({"stop_regex": "a", "beam_width": 2}, r"stop_regex: got \['a'\], expected None in a beam"),
    ({"logprob_token_ids": 5}, "logprob_token_ids: got 5, expected a list of token ids"),
    ({"logprob_token_ids": []}, r"logprob_token_ids: got \[\], expected a list of 1 to 128"),
    ({"logprob_token_ids": [3, 3]}, r"logprob_token_ids: got \[3, 3\], expected a list of 1 to"),
    ({"logprob_token_ids": list(range(129))}, "logprob_token_ids: got .* 1 to 128 distinct"),
    ({"logprobs": 2, "logprob_token_ids": [3]}, "logprobs: got 2, expected None, or the number"),
    ({"logprob_token_ids": [3], "beam_width": 2}, "logprob_token_ids: got .* in a beam search"),
    ({"repetition_detection": 5}, "repetition_detection: got 5, expected None, or Repetition"),
    (
        {"repetition_detection": {"min_count": 2}},
        "RepetitionDetection: max_pattern_size is required",
    ),
    ({"repetition_detection": {"max_pattern_size": 257}}, "max_pattern_size: got 257, expected"),
    ({"repetition_detection": {"max_pattern_size": True}}, "max_pattern_size: got True, expected"),
    (
        {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4}},
        "repetition_detection.min_pattern_size: got 4, expected an integer from 0 to 3",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
        "repetition_detection.min_count: got 1, expected an integer from 2 to 256",
    ),
    (
        {
            "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
            "beam_width": 2,
            "temperature": 0,
        },
        "repetition_detection: got .* expected None in a beam search",
    ),
    ({"stop_token_ids": 5}, "stop_token_ids: got 5, expected a list of token ids"),
    ({"stop_token_ids": "ab"}, "stop_token_ids: got 'ab', expected a list of token ids"),
    ({"stop_token_ids": [[1]]}, r"stop_token_ids: got \[1\], expected token ids"),
    ({"allowed_token_ids": {3}}, r"allowed_token_ids: got \{3\}, expected a list of token ids"),
    ({"allowed_token_ids": []}, r"allowed_token_ids: got \[\], expected a list of at least one"),
    ({"bad_words": "abc"}, "bad_words: got 'abc', expected a list of strings"),
    ({"bad_words": [" "]}, "bad_words: got ' ', expected a list of strings, none of them empty"),
    ({"logit_bias": [1]}, r"logit_bias: got \[1\], expected an object of token ids and numbers"),
    ({"logit_bias": {1: "x"}}, "logit_bias: got 'x', expected a number from -100 to 100"),
    ({"logit_bias": {1: math.nan}}, "logit_bias: got nan, .* from -100 to 100 for token id 1"),
    ({"logit_bias": {1: 1000}}, "logit_bias: got 1000, .* from -100 to 100 for token id 1"),
    ({"logit_bias": {1: -100.5}}, "logit_bias: got -100.5, expected a number from -100 to 100"),
    ({"logit_bias": {"one": 1}}, "logit_bias: got the key 'one', expected token ids"),
    ({"ignore_eos": "x"}, "ignore_eos: got 'x', expected True or False"),
    ({"detokenize": 1}, "detokenize: got 1, expected True or False"),
    ({"temperature": None}, "temperature: got None"),
    ({"dry_base": 0.9}, "dry_base: got 0.9"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers: got '', expected a list of at"),
    ({"dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers: got "),
    ({"dry_multiplier": 1, "beam_width": 2}, "dry_multiplier: got 1.0, expected 0.0 in a beam"),
    ({"typical_p": 0}, "typical_p: got 0, expected a number above 0 and at most 1"),
    ({"top_n_sigma": -0.5}, "top_n_sigma: got -0.5, expected 0 or -1"),
    ({"dynatemp_range": 2.1}, "dynatemp_range: got 2.1"),
    ({"dynatemp_exponent": 0}, "dynatemp_exponent: got 0, expected a number above 0"),
    ({"xtc_probability": 1.1}, "xtc_probability: got 1.1"),
    ({"xtc_threshold": float("nan")}, "xtc_threshold: got nan"),
    ({"typical_p": 0.5, "temperature": 0}, "typical_p: got 0.5, expected 1.0 when"),
    ({"xtc_probability": 0.5, "temperature": 0}, "xtc_probability: got 0.5, expected 0.0 when"),
    ({"dynatemp_range": 0.5, "temperature": 0}, "dynatemp_range: got 0.5, expected 0.0 when"),
    ({"top_n_sigma": 1, "beam_width": 2}, "top_n_sigma: got 1.0, expected 0.0 in a beam"),
    ({"xtc_probability": 1, "beam_width": 2}, "xtc_probability: got 1.0, expected 0.0 in a"),
    ({"temperature": 10**400}, "temperature: got 1000"),
    ({"presence_penalty": math.inf}, "presence_penalty: got inf, expected a number from -2 to 2"),
    ({"repetition_penalty": 1e39}, r"repetition_penalty: got 1e\+39, expected a number above 0"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty: got 1e-40, expected a number above 0"),
    ({"min_tokens": 17}, r"min_tokens: got 17, expected an integer from 0 to max_tokens"),
    ({"max_tokens": 10**5000}, "max_tokens: got a number of thousands of digits, expected"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        SamplingParams(**fields)
    assert error.value.param == next(iter(fields))


BOUNDS = {
    "n": (1, 16384),
    "best_of": (1, 16384),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (-1, 2**31 - 1),
    "prompt_logprobs": (-1, 2**31 - 1),
    "prompt_logprob_start": (0, 2**31 - 1),
    "beam_width": (1, 1024),
    "mirostat_mode": (0, 2),
    "dry_allowed_length": (1, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
}
OTHERS = {
    "min_tokens": {"max_tokens": None},
    "prompt_logprob_start": {"prompt_logprobs": 1},
}


def test_every_integer_has_bounds():
    """A new integer field must be added to the bounds."""
    found = {name for name, option in OPTIONS.items() if option.type in (int, int | None)}
    assert found == BOUNDS.keys()


def test_every_field_is_declared_or_internal():
    """What the frontend fills in has no declaration; every other field has one with its words."""
    internal = {"bad_words_token_ids", "answer_marks", "dry_sequence_breaker_ids"}
    assert OPTIONS.keys() | internal == set(SamplingParams.__struct_fields__)
    assert all(option.help and option.takes for option in OPTIONS.values())


@pytest.mark.parametrize("name", BOUNDS)
def test_integers_fit_what_they_are_stored_in(name):
    others = OTHERS.get(name, {})
    for value in BOUNDS[name]:
        params = SamplingParams(**{name: value} | others)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    low, high = BOUNDS[name]
    wrong = (low - 1, high + 1, 10**30, -(10**30), 2.0, "2", False, np.float64(2), [2])
    for value in wrong:
        with pytest.raises(InvalidRequest, match=f"^{name}: got ") as error:
            SamplingParams(**{name: value} | others)
        assert error.value.param == name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [-1, 2**31, 10**30, True, 1.0, None])
def test_token_ids_fit_what_they_are_stored_in(name, token):
    value = {token: 1.0} if name == "logit_bias" else [token]
    with pytest.raises(InvalidRequest, match=f"^{name}: got ") as error:
        SamplingParams(**{name: value})
    assert error.value.param == name


def test_what_means_the_same():
    params = SamplingParams(
        stop="a",
        seed=-1,
        top_k=-1,
        logprobs=True,
        stop_token_ids=[3, 3],
        logit_bias={"4": 100, 5: -100},
    )
    assert (params.stop_strings, params.seed, params.top_k, params.logprobs) == (["a"], None, 0, 1)
    assert params.stop_token_ids == [3] and params.logit_bias == {4: 100.0, 5: -100.0}
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]


def test_numpy_numbers_become_pythons():
    params = SamplingParams(
        max_tokens=np.int64(7),
        top_k=np.uint8(3),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([4, 5]),
        allowed_token_ids=[np.int32(6)],
        logit_bias={np.int64(8): np.float32(1.5)},
    )
    plain = SamplingParams(
        max_tokens=7,
        top_k=3,
        temperature=0.5,
        stop_token_ids=[4, 5],
        allowed_token_ids=[6],
        logit_bias={8: 1.5},
    )
    assert params == plain
    assert msgspec.msgpack.encode(params) == msgspec.msgpack.encode(plain)


MISTAKES = [
    (SamplingParams, {"temprature": 1}, "unknown field 'temprature'\nhint: did you mean temp"),
    (SamplingParams, {"max_new_tokens": 1}, "hint: did you mean max_tokens?"),
    (BeamSearchParams, {"beam_with": 2}, "unknown field 'beam_with'\nhint: did you mean beam_w"),
    (BeamSearchParams, {"max_tokens": 2}, "BeamSearchParams: beam_width is required"),
    (
        BeamSearchParams,
        {"beam_width": 0, "max_tokens": 2},
        "beam_width: got 0, expected None, or an integer from 1 to 1024",
    ),
    (BeamSearchParams, {"beam_width": None, "max_tokens": 2}, "beam_width: got None, expected a"),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 10**30}, "max_tokens: got 1000000000000"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), MISTAKES)
def test_a_mistaken_field_is_named(kind, fields, message):
    with pytest.raises(InvalidRequest) as error:
        kind(**fields)
    assert message in str(error.value)


def test_fields_have_names():
    with pytest.raises(InvalidRequest, match=r"SamplingParams: got 0\.5 as a positional argument"):
        SamplingParams(0.5)
