"""Streaming equals decoding at once, stop strings are found wherever tokens cut them, and nothing
of them is shown early. All exact.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer, decode_whole_characters
from octavo.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiers import examples
from tests.support.tiny_vocabularies import bpe_source, sentencepiece_source


@cache
def tokenizer(kind: str) -> TextTokenizer:
    return load_tokenizer(bpe_source("smollm") if kind == "bpe" else sentencepiece_source(False))


def params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **options)


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """Returns what a stream shows, token by token, and the rest at the end."""
    shown = []
    for i in ids:
        detokenizer.push([i])
        shown.append(detokenizer.delta())
    return [*shown, detokenizer.delta(finished=True)]


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_add_up_to_decode(kind: str, skip: bool) -> None:
    ours = tokenizer(kind)

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(st.integers(0, ours.vocab_size + 3) | st.integers(3, 258), max_size=40))
    def check(ids: list[int]) -> None:
        detokenizer = Detokenizer(ours, params(skip_special_tokens=skip))
        parts = deltas(detokenizer, ids)
        whole = ours.decode(ids, skip_special_tokens=skip)
        assert "".join(parts) == whole == detokenizer.text(finished=True)

    check()


@settings(max_examples=examples(40), deadline=None)
@given(st.text(max_size=40))
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_never_half_a_character(kind: str, text: str) -> None:
    text = text.replace("\ufffd", "")
    ours = tokenizer(kind)
    ids = ours.encode(text, add_special_tokens=False)
    assert all("\ufffd" not in part for part in deltas(Detokenizer(ours, params()), ids))


@settings(max_examples=examples(40), deadline=None)
@given(st.text(alphabet="ab é漢😀", min_size=1, max_size=12))
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_a_text_completes_the_character_that_its_prompt_begins(kind: str, text: str) -> None:
    ours = tokenizer(kind)
    ids = ours.encode(text, add_special_tokens=False)
    for num_kept in range(len(ids) + 1):
        kept, rest = ids[:num_kept], ids[num_kept:]
        told = decode_whole_characters(ours, kept)
        made = deltas(Detokenizer(ours, params(), kept), rest)
        assert told + "".join(made) == ours.decode(ids)
        assert not rest or "\ufffd" not in told + "".join(made)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.text(alphabet="abcd é漢", max_size=40),
    st.lists(st.text(alphabet="abcd é漢", min_size=1, max_size=5), min_size=1, max_size=3),
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(include: bool, text: str, stops: list[str]) -> None:
    """The text ends at the first token that completes a stop string; no stream shows what is taken
    back.
    """
    ours = tokenizer("bpe")
    ids = ours.encode(text)
    detokenizer = Detokenizer(ours, params(stop=stops, include_stop_str_in_output=include))
    parts = deltas(detokenizer, ids)
    expected, stop = reference(ours, ids, stops, include)
    assert (detokenizer.text(finished=True), detokenizer.stop) == (expected, stop)
    assert "".join(parts) == expected


def reference(
    ours: TextTokenizer, ids: list[int], stops: list[str], include: bool
) -> tuple[str, str | None]:
    """Decodes every prefix by itself and stops at the first stop string; bytes of a character that
    is not whole are left out.
    """
    for end in range(len(ids) + 1):
        text = b"".join(map(ours.token_bytes, ids[:end])).decode(errors="ignore")
        found = [(text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
        if found:
            place, _, stop = min(found)
            return text[: place + len(stop) * include], stop
    return ours.decode(ids), None


def test_holds_back_the_longest_stop_less_one() -> None:
    ours = tokenizer("bpe")
    detokenizer = Detokenizer(ours, params(stop=["a", "wxyz"]))
    detokenizer.push(ours.encode("ooooowxy"))
    assert (
        detokenizer.text(finished=False) == "ooooo"
        and detokenizer.text(finished=True) == "ooooowxy"
    )
    assert detokenizer.push(ours.encode("z!")) == "wxyz"
    assert detokenizer.text(finished=False) == detokenizer.text(finished=True) == "ooooo"


def test_tokens_after_a_stop_are_dropped() -> None:
    ours = tokenizer("bpe")
    detokenizer = Detokenizer(ours, params(stop="7"))
    assert detokenizer.push(ours.encode("56789")) == "7"
    assert detokenizer.text() == "56"


def test_min_tokens_come_before_any_stop() -> None:
    ours = tokenizer("bpe")
    detokenizer = Detokenizer(ours, params(stop=["3"], min_tokens=4))
    assert detokenizer.push(ours.encode("3333")) is None
    assert detokenizer.push(ours.encode("43")) == "3"
    assert detokenizer.text() == "33334"


def test_the_space_before_a_continuation_stays() -> None:
    ours = load_tokenizer(sentencepiece_source(True))
    ids = ours.encode("light", add_special_tokens=False)
    detokenizer = Detokenizer(ours, params())
    detokenizer.push(ids)
    assert detokenizer.text() == " light" and ours.decode(ids) == "light"


class Letters:
    """A tokenizer whose tokens are letters."""

    special_token_ids = frozenset()

    def token_bytes(self, token_id):
        return bytes([token_id])


@pytest.mark.parametrize("before", range(6))
def test_other_stop_strings_count_from_their_change_on(before):
    """One that is complete before the change does not; one that has begun before does."""
    made = Detokenizer(Letters(), SamplingParams(stop=["xyz"]))
    text = b"abcdabcd"
    assert made.push(text[:before]) is None
    made.change_stops(params(stop=["cd"]))
    assert made.push(text[before:]) == "cd"
    assert made.text() == ("ab" if before < 4 else "abcdab")


def test_without_stop_strings_nothing_is_held_back_any_more():
    made = Detokenizer(Letters(), SamplingParams(stop=["wxyz"]))
    made.push(b"abcd")
    assert made.delta() == "a"
    made.change_stops(params())
    assert made.delta() == "bcd" and made.push(b"wxyz") is None


START, END = "<|im_start|>", "<|im_end|>"
SPELLED_STOPS = [END, f"b{END}", f"{START}a", f"{END}{START}", f"{END}c{START}", "cd"]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", "<|", "|>", START, END]), max_size=16),
    st.lists(st.sampled_from(SPELLED_STOPS), min_size=1, max_size=3, unique=True),
)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_spell_special_tokens(
    include: bool, pieces: list[str], stops: list[str]
) -> None:
    """The text ends where the first stop string begins in the text that spells special tokens."""
    ours = tokenizer("bpe")
    ids = [
        token_id
        for piece in pieces
        for token_id in ours.encode(piece, add_special_tokens=False, allow_special_text=True)
    ]
    detokenizer = Detokenizer(ours, params(stop=stops, include_stop_str_in_output=include))
    parts = deltas(detokenizer, ids)
    for end in range(len(ids) + 1):
        chars = [
            (char, token_id not in ours.special_token_ids)
            for token_id in ids[:end]
            for char in ours.token_bytes(token_id).decode()
        ]
        whole = "".join(char for char, _ in chars)
        found = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if found:
            break
    place, stop = min(found, default=(len(chars), None))
    expected = "".join(char for char, is_shown in chars[:place] if is_shown)
    expected += stop if include and stop is not None else ""
    assert (detokenizer.text(finished=True), detokenizer.stop) == (expected, stop)
    assert "".join(parts) == expected


def test_a_special_token_that_no_stop_string_spells_stops_nothing() -> None:
    ours = tokenizer("bpe")
    (start,) = ours.encode(START, add_special_tokens=False, allow_special_text=True)
    detokenizer = Detokenizer(ours, params(stop=[END, "<|"]))
    assert detokenizer.push([start, *ours.encode("ab", add_special_tokens=False)]) is None
    assert detokenizer.text() == "ab"
