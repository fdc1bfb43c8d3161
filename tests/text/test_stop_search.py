"""Patterns end a text wherever pieces cut it, as a search of the whole text would, and nothing of a
match is shown early. All exact.
"""

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.api.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import load_tokenizer
from tests.support.tiers import examples
from tests.support.tiny_vocabularies import bpe_source

TOKENIZER = load_tokenizer(bpe_source("smollm"))

PATTERNS = [
    "ab",
    "a{2,4}b",
    "[ab]c",
    "(a|bc)(?:d|é)",
    r"\bcab\b",
    "^ab",
    "(?m)^b",
    "(?i)AB?C",
    r"b\n{1,3}a",
    "b$",
]


def params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **options)


def pieces(text: str) -> list[int]:
    """Returns a token for each byte, so that a text's prefixes are what a search sees."""
    return [token for char in text for token in TOKENIZER.encode(char, add_special_tokens=False)]


def first_end(pattern: str, text: str) -> tuple[int, int] | None:
    """Returns where the first match lies, in the shortest prefix of the text that has one."""
    for end in range(1, len(text) + 1):
        found = re.search(pattern, text[:end], re.ASCII)
        if found is not None and found.end() == end:
            return found.span()
    return None


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_pattern_ends_the_text_where_its_first_match_ends(pattern, keeps):
    @settings(max_examples=examples(60), deadline=None)
    @given(st.text("abcdAé \n", max_size=30))
    def check(text):
        options = params(stop_regex=pattern, include_stop_str_in_output=keeps)
        detokenizer = Detokenizer(TOKENIZER, options)
        shown = []
        for token in pieces(text):
            detokenizer.push([token])
            shown.append(detokenizer.delta())
        shown.append(detokenizer.delta(finished=True))
        place = first_end(pattern, text)
        assert detokenizer.stop == (None if place is None else pattern)
        wanted = text if place is None else text[: place[keeps]]
        assert detokenizer.text() == wanted == "".join(shown)

    check()


def test_the_earliest_start_wins_among_strings_and_patterns():
    detokenizer = Detokenizer(TOKENIZER, params(stop=["cd"], stop_regex=["b.{2}", "xyz"]))
    assert detokenizer.push(pieces("aabcd")) == "b.{2}"
    assert detokenizer.text() == "aa"


def test_tokens_before_min_tokens_complete_no_match():
    detokenizer = Detokenizer(TOKENIZER, params(stop_regex="ab", min_tokens=4))
    assert detokenizer.push(pieces("ababab")) == "ab"
    assert detokenizer.text() == "abab"


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4), st.text("ab"))
@settings(max_examples=examples(60), deadline=None)
def test_a_pattern_of_plain_words_is_those_stop_strings(words, text):
    assume(words)
    ends = []
    for options in ({"stop": words}, {"stop_regex": words}):
        detokenizer = Detokenizer(TOKENIZER, params(**options))
        detokenizer.push(pieces(text))
        ends.append((detokenizer.stop, detokenizer.text()))
    assert ends[0] == ends[1]


def test_a_pattern_that_is_costly_elsewhere_takes_linear_time():
    detokenizer = Detokenizer(TOKENIZER, params(stop_regex=["(a?){100}a{100}b", "(a|a|aa){90}c"]))
    ids = pieces("a" * 400)
    started = time.process_time()
    assert detokenizer.push(ids) is None
    assert time.process_time() - started < 2
