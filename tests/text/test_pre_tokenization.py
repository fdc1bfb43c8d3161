"""Token ids under each pre-tokenizer name are llama.cpp's, on difficult texts and on 400 seeded
lines of many scripts. All exact, except for texts on which llama.cpp is known to differ from the
model's own tokenizer.json.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.api.errors import UnsupportedModel
from octavo.text.pre_tokenization import PRE_TOKENIZATIONS, PreTokenization
from octavo.text.vocabulary import build_tokenizer
from tests.support.many_scripts import lines
from tests.support.pair_vocabulary import DATA, NUM_LINES, digest_of, pair_vocabulary


def _categories(text: str) -> set[str]:
    return {unicodedata.category(letter) for letter in text}


def has_marks(text: str) -> bool:
    """llama.cpp's `std::regex` takes [^a-z] for capitals, and no marks into words."""
    return any(category.startswith("M") for category in _categories(text))


def has_cased_letters_beyond_ascii(text: str) -> bool:
    """llama.cpp's `std::regex` knows only the case of ASCII letters."""
    return any(
        not letter.isascii() and unicodedata.category(letter) in ("Lu", "Ll", "Lt")
        for letter in text
    )


def has_capitals(text: str) -> bool:
    """llama.cpp takes the categories Lu and Ll for any letter."""
    return not _categories(text).isdisjoint(("Lu", "Lt"))


def has_spaces_beyond_ascii(text: str) -> bool:
    """llama.cpp replaces them by a vertical tab, which no range of Asian characters contains."""
    return any(letter.isspace() and not letter.isascii() for letter in text)


def has_numbers_after_blanks(text: str) -> bool:
    """llama.cpp's own splitter of numbers keeps what stands before a number in its first piece."""
    kinds = "".join(unicodedata.category(letter)[0] for letter in text)
    return re.search("[ZC]N", kinds) is not None


def has_numbers_beyond_ascii(text: str) -> bool:
    r"""llama.cpp's \d has other numbers than the expression's engine."""
    return any(unicodedata.category(letter)[0] == "N" and not letter.isascii() for letter in text)


def has_numbers_beside_letters(text: str) -> bool:
    r"""llama.cpp does not ask for the end of a word, \b, behind digits."""
    return re.search(r"\d\w*[^\W\d]|\d_", text) is not None


Excuse = Callable[[str], bool]
CASED: tuple[Excuse, ...] = (has_marks, has_cased_letters_beyond_ascii)
EXCUSES: dict[str, tuple[Excuse, ...]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), CASED),
    "granite-embed-multi-97m": (has_cased_letters_beyond_ascii,),
    "kimi-k2": (has_marks, has_capitals),
    "youtu": (has_capitals,),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        (
            has_capitals,
            has_numbers_after_blanks,
            has_numbers_beyond_ascii,
            has_numbers_beside_letters,
        ),
    ),
    "afmoe": (has_numbers_after_blanks,),
    "superbpe": (has_numbers_beyond_ascii,),
    "deepseek-llm": (has_spaces_beyond_ascii,),
    "deepseek-coder": (has_spaces_beyond_ascii,),
}
"""Names of models whose tokenizer.json llama.cpp approximates, with the texts that show it."""


@cache
def reference() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


@cache
def ids_of(pre: PreTokenization) -> list[list[int]]:
    name = next(name for name, other in PRE_TOKENIZATIONS.items() if other == pre)
    tokenizer = build_tokenizer(pair_vocabulary(name), Path("m.gguf")).tokenizer
    texts = [*reference()["texts"], *lines(NUM_LINES)]
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", PRE_TOKENIZATIONS)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    known, digests = reference()["groups"][reference()["names"][name]]
    found = ids_of(PRE_TOKENIZATIONS[name])
    texts = [*reference()["texts"], *lines(NUM_LINES)]
    agree = [ours == theirs for ours, theirs in zip(found, known, strict=False)]
    agree += [
        digest_of(ours) == digests[4 * i : 4 * i + 4] for i, ours in enumerate(found[len(known) :])
    ]
    wrong = [text for text, same in zip(texts, agree, strict=True) if not same]
    excuses = EXCUSES.get(name, ())
    assert not [text for text in wrong if not any(excuse(text) for excuse in excuses)]
    for excuse in excuses:
        assert any(excuse(text) for text in wrong), excuse.__name__
    assert sum(agree) > len(texts) / 4


def test_every_name_has_a_reference() -> None:
    assert reference()["names"].keys() == PRE_TOKENIZATIONS.keys()


def test_an_unknown_name_is_the_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    wild = replace(pair_vocabulary("default"), pre="wild")
    with caplog.at_level(logging.WARNING):
        built = build_tokenizer(wild, Path("m.gguf")).tokenizer
        build_tokenizer(replace(wild, pre=""), Path("m.gguf"))
    assert "the header has no pre-tokenizer" in caplog.text
    assert "m.gguf: unknown pre-tokenizer 'wild'" in caplog.text and "'default'" in caplog.text
    text = reference()["texts"][-1]
    known, _ = reference()["groups"][reference()["names"]["default"]]
    assert built.encode(text, add_special_tokens=False).ids == known[-1]
    for name, close in (("wild", ""), ("qwen-2", ", the closest is 'qwen2'")):
        pattern = rf"unknown pre-tokenizer '{name}' .*; \d+ names are supported{close}"
        with pytest.raises(UnsupportedModel, match=pattern):
            build_tokenizer(replace(wild, pre=name), Path("m.gguf"), strict=True)
