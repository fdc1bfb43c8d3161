"""A text is never tokenized to fewer tokens than the bound said, and the bound says something."""

from __future__ import annotations

import threading
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.text.encoding import without_special_tokens
from octavo.text.length_bound import NFC_SHRINKS, LengthBound
from octavo.text.tokenizer import TextTokenizer, encode_text, load_tokenizer
from tests.support.tiers import examples
from tests.support.tiny_vocabularies import bpe_source, sentencepiece_source, trained_bpe


def kinds() -> dict[str, TextTokenizer]:
    return {
        "byte level": load_tokenizer(bpe_source("smollm")),
        "nfc": load_tokenizer(bpe_source("qwen2")),
        "byte fallback": load_tokenizer(sentencepiece_source(dummy_prefix=True)),
    }


KINDS = kinds()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(max_size=80))
@example(text="\u0399\u0308\u0301" * 20)
@example(text="the colours of the rays " * 5)
@example(text="\x06\x13 \U000f0000")
@example(text="<|im_start|>" * 9)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    least = tokenizer.fewest_tokens(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False, allow_special_text=True))
    assert least >= len(text.encode()) // 200 - 1, "a bound of nothing refuses nothing"


def test_blanks_that_a_special_token_swallows_do_not_count() -> None:
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    text = "<|user|>" + " " * 10_000
    assert len(tokenizer.encode(text).ids) == 1
    assert LengthBound(tokenizer).fewest_tokens(text) == 1
    assert LengthBound(tokenizer).fewest_tokens("word " * 10_000) > 1000


def test_bytes_without_a_token_do_not_count() -> None:
    letters = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter != "z"]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert len(tokenizer.encode("z" * 1000 + "a").ids) == 1
    assert LengthBound(tokenizer).fewest_tokens("z" * 1000 + "a") == 1
    tokenizer.normalizer = normalizers.NFC()
    assert LengthBound(tokenizer).fewest_tokens("a" * 1000) == 0, "NFC may make a z of anything"


def changed(**parts: object) -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


UNBOUNDED = {
    "strips accents": changed(normalizer=normalizers.StripAccents()),
    "replaces by less": changed(normalizer=normalizers.Replace("abc", "a")),
    "replaces a pattern": changed(normalizer=normalizers.Replace(Regex("a+"), "a")),
    "removes": changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "drops blanks": changed(pre_tokenizer=pre_tokenizers.Whitespace()),
    "words": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "unknown characters": Tokenizer(models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_text_may_vanish_there_is_no_bound(name: str) -> None:
    assert LengthBound(UNBOUNDED[name]).fewest_tokens("a" * 100_000) == 0


def test_nfc_shrinks_a_text_by_less_than_that() -> None:
    """Every character that NFC composes, taken apart and spelled by its longest equivalents, is
    within the bound.
    """
    decomposed = [chr(code) for code in range(0x110000) if unicodedata.decomposition(chr(code))]
    apart = {text: unicodedata.normalize("NFD", text) for text in [*decomposed, "\uac01"]}
    longest: dict[str, int] = {}
    for text, parts in apart.items():
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(text.encode()))
    for text, parts in apart.items():
        made = unicodedata.normalize("NFC", text)
        num_bytes = sum(longest.get(part, len(part.encode())) for part in parts)
        assert num_bytes <= NFC_SHRINKS * len(made.encode())
    assert len(apart) > 5000


SPECIAL = "<|im_start|>"


@pytest.mark.parametrize("text", ["hello", f"hello {SPECIAL} there", f"{SPECIAL}user" * 3000])
def test_special_text_is_text_to_the_plain_tokenizer(text: str) -> None:
    """The plain tokenizer gives the ids that the package gives with encode_special_tokens."""
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    tokenizer.add_tokens(["<added>"])
    plain = without_special_tokens(tokenizer)
    expected = Tokenizer.from_str(tokenizer.to_str())
    expected.encode_special_tokens = True
    assert encode_text(plain, text).ids == expected.encode(text).ids
    assert encode_text(tokenizer, text).ids == tokenizer.encode(text).ids
    assert plain.encode("<added>").ids == tokenizer.encode("<added>").ids


def test_threads_encode_at_the_same_time() -> None:
    """Texts with special tokens and without them, long and short, get the ids they get alone."""
    tokenizer = KINDS["byte level"]
    texts = [f"{SPECIAL} hello", "hello", f"colour {SPECIAL} " * 2000, "rays of light " * 2000]
    ways = [(text, allow) for text in texts for allow in (True, False)]
    expected = [tokenizer.encode(text, allow_special_text=allow) for text, allow in ways]
    wrong: list[object] = []

    def encode_all() -> None:
        for (text, allow), ids in zip(ways * 3, expected * 3, strict=True):
            if tokenizer.encode(text, allow_special_text=allow) != ids:
                wrong.append((text[:20], allow))

    threads = [threading.Thread(target=encode_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_tokenizers_own_truncation_and_padding_are_not_applied() -> None:
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    ids = TextTokenizer(tokenizer, bpe_source("smollm"), None).encode("colour " * 20)
    assert ids == trained_bpe().encode("colour " * 20).ids
