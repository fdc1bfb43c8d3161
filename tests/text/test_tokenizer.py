"""Ids are exactly those of the tokenizer a vocabulary came from, texts come back bit for bit, and
special text is kept apart. All exact.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.ports import Vocabulary
from octavo.text.encoding import added_runs, without_special_tokens
from octavo.text.pre_tokenization import PRE_TOKENIZATIONS
from octavo.text.token_bytes import format_token
from octavo.text.tokenizer import load_tokenizer
from tests.support.tiers import examples
from tests.support.tiny_vocabularies import (
    TEXT,
    bpe_source,
    bpe_with_specials,
    save_tokenizer_json,
    sentencepiece_source,
    trained_bpe,
    trained_sentencepiece,
)
from tests.support.token_spellings import SPELLINGS

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLES = [
    "",
    "Hello world",
    "  two  spaces\n\n\nand lines \n x\r\n",
    "In 1730 there were 12345 and ٣٤ and Ⅷ.",
    "I'LL we'll IT'S don't",
    "caf\u00e9 cafe\u0301 \u212b",
    "日本語 漢字かな 한국어",
    "👩‍👩‍👧‍👦🎉",
    "def f(x):\n\treturn x**2  # <table>\n\n",
    "\x00\x01\x7f",
    TEXT[:3000],
]
texts = st.text(max_size=60) | st.text(alphabet="ab1 2\n\t'sSlLIé<>|_", max_size=60)


def original(pre: str) -> Tokenizer:
    """Makes the tokenizer that the model's own tokenizer.json would be."""
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(QWEN2), "isolated", False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    return tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2"])
def test_bpe_ids_are_the_originals(pre: str) -> None:
    ours, theirs = load_tokenizer(bpe_source(pre)), original(pre)
    theirs.encode_special_tokens = True

    @settings(max_examples=examples(60), deadline=None)
    @given(texts)
    def check(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids

    for text in SAMPLES:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    check()


@pytest.mark.parametrize(
    "pre", [name for name, pre in PRE_TOKENIZATIONS.items() if pre.is_byte_level]
)
def test_every_split_gives_the_text_back(pre: str) -> None:
    tokenizer = load_tokenizer(bpe_source(pre))
    normalizer = PRE_TOKENIZATIONS[pre].normalizer
    for text in SAMPLES:
        whole = text if normalizer is None else normalizer().normalize_str(text)
        assert tokenizer.decode(tokenizer.encode(text)) == whole


def test_the_digits_trap() -> None:
    """The pre-tokenization smollm takes each digit alone, whatever merges the vocabulary has."""
    tokenizer = load_tokenizer(bpe_source("smollm"))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1730")] == ["1", "7", "3", "0"]
    assert len(load_tokenizer(bpe_source("gpt-2")).encode("1730")) < 4


@pytest.mark.model
def test_opticks_ids() -> None:
    tokenizer = load_tokenizer(open_checkpoint(resolve("smollm2")).tokenizer_source())
    folder = Path(__file__).parents[1] / "data"
    facts = json.loads((folder / "opticks.json").read_text())
    text = (folder / "opticks.txt").read_bytes().decode()
    ids = tokenizer.encode(text)
    assert len(ids) == facts["tokens"] == 20480
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == facts["ids_sha256"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (2, 0, 4) and tokenizer.vocab_size == 49152


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_sentencepiece_ids_are_its_own(dummy_prefix: bool) -> None:
    ours = load_tokenizer(sentencepiece_source(dummy_prefix, add_bos_token=False))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained_sentencepiece(dummy_prefix))

    @settings(max_examples=examples(100), deadline=None)
    @given(
        texts | st.text(alphabet="ab \n<table>", max_size=40) | st.text(alphabet="a ", max_size=60)
    )
    def check(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text

    for text in [*SAMPLES, TEXT]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    check()


def test_first_tokens() -> None:
    """The first token is added where the header says so, else where models of the kind do it."""
    text = "light"
    bare = load_tokenizer(sentencepiece_source(True, add_bos_token=False)).encode(text)
    assert load_tokenizer(sentencepiece_source(True)).encode(text) == [1, *bare]
    assert load_tokenizer(sentencepiece_source(True)).encode(text, add_special_tokens=False) == bare
    assert load_tokenizer(sentencepiece_source(True)).encode(
        "<s>light", allow_special_text=True
    ) == [1, 1, *bare]
    bare = load_tokenizer(bpe_source("smollm")).encode(text)
    assert load_tokenizer(bpe_source("smollm", add_bos_token=True)).encode(text) == [1, *bare]
    assert load_tokenizer(bpe_source("llama-bpe")).encode(text)[0] == 1


@pytest.mark.parametrize(
    "source",
    [bpe_source("smollm"), sentencepiece_source(False), sentencepiece_source(True)],
    ids=["bpe", "spm", "prefix"],
)
def test_special_text_stays_text_unless_allowed(source) -> None:
    tokenizer = load_tokenizer(source)
    special = source.special_tokens["eos_token"]
    text = f"a{special}b"
    kept = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.special_token_ids.isdisjoint(kept)
    assert tokenizer.decode(kept) == text
    allowed = tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
    assert (
        2 in allowed
        and tokenizer.decode(allowed) == "ab"
        and tokenizer.decode(allowed, skip_special_tokens=False) == text
    )


def test_tokenizer_json_directories(tmp_path: Path) -> None:
    path = save_tokenizer_json(
        tmp_path / "m", bpe_with_specials(), chat_template=[{"name": "default", "template": "hi"}]
    )
    source = tokenizer_source(path, {"eos_token_id": 0}, {"eos_token_id": [2, 0]})
    assert source is not None and source.eos_token_ids == (2, 0) and source.chat_template == "hi"
    assert source.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode(TEXT[:500]) == trained_bpe().encode(TEXT[:500]).ids
    assert tokenizer.decode(tokenizer.encode("漢字 <|im_end|>")) == "漢字 <|im_end|>"
    (path / "chat_template.jinja").write_text("file")
    assert tokenizer_source(path, {}, {}).chat_template == "file"
    assert tokenizer_source(tmp_path, {}, {}) is None


def test_padded_ids_have_no_bytes() -> None:
    tokenizer = load_tokenizer(bpe_source("smollm"))
    assert (
        tokenizer.token_bytes(10**6) == b""
        and tokenizer.decode([10**6, *tokenizer.encode("x")]) == "x"
    )


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="unknown pre-tokenizer 'wild'"):
        load_tokenizer(bpe_source("wild"), strict=True)
    vocabulary = Vocabulary("rwkv", "default", [b"a"], [1])
    with pytest.raises(
        UnsupportedModel, match="tokenizer model 'rwkv', supported in GGUF: gpt2, gemma4"
    ):
        load_tokenizer(bpe_source("smollm", vocabulary=vocabulary))
    for damaged in (
        Vocabulary("gpt2", "smollm", [b"a"], [1], merges=[b"a b"]),
        Vocabulary("gpt2", "smollm", [b"\xff"], [1], merges=[b"a b"]),
    ):
        with pytest.raises(WeightMismatch, match=r"m\.gguf: damaged vocabulary"):
            load_tokenizer(bpe_source("smollm", vocabulary=damaged))
    with pytest.raises(WeightMismatch, match=r"tokenizer\.ggml\.merges is missing"):
        load_tokenizer(bpe_source("smollm", vocabulary=Vocabulary("gpt2", "smollm", [b"a"], [1])))
    two = Vocabulary("gpt2", "smollm", [b"a", b"b"], [1], merges=[b"a b"])
    with pytest.raises(WeightMismatch, match="1 token types for 2 tokens"):
        load_tokenizer(bpe_source("smollm", vocabulary=two))
    with pytest.raises(WeightMismatch, match="0 scores for 1 tokens"):
        load_tokenizer(bpe_source("smollm", vocabulary=Vocabulary("llama", "default", [b"a"], [1])))
    path = save_tokenizer_json(tmp_path / "m", bpe_with_specials())
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightMismatch, match=r"tokenizer\.json: not a readable tokenizer"):
        load_tokenizer(tokenizer_source(path, {}, {}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bos_token": 5}, "bos_token is 5, expected a string or an object"),
        ({"eos_token": {"text": "x"}}, "eos_token is {'text': 'x'}, expected"),
        ({"chat_template": {"default": 5}}, "chat_template is a int, expected a string"),
        (
            {"chat_template": [{"name": "default", "template": 5}]},
            "chat_template is a int, expected a string",
        ),
    ],
)
def test_damaged_settings_are_named(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    path = save_tokenizer_json(tmp_path / "m", bpe_with_specials())
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(WeightMismatch) as error:
        tokenizer_source(path, {}, {})
    assert message in str(error.value)


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    path = save_tokenizer_json(tmp_path / "m", bpe_with_specials())
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(WeightMismatch, match=r"chat_template\.jinja: cannot be read"):
        tokenizer_source(path, {}, {})


def test_added_tokens_are_added_in_few_calls() -> None:
    """Each call that adds tokens takes time for all of them."""
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<unused{i}>", special=True) for i in range(500)])
    tokenizer.add_tokens([AddedToken(f"plain{i}") for i in range(20)])
    tokenizer.add_special_tokens([AddedToken("<last>", special=True)])
    runs = added_runs(tokenizer.get_added_tokens_decoder())
    assert len(runs) <= 4 and [is_special for is_special, _ in runs][-2:] == [False, True]
    plain = without_special_tokens(tokenizer)
    assert plain.get_vocab() == tokenizer.get_vocab()
    assert plain.encode("plain7", add_special_tokens=False).ids == [first + 507]
    assert tokenizer.encode("<unused7>", add_special_tokens=False).ids == [first + 7]
    assert first + 7 not in plain.encode("<unused7>", add_special_tokens=False).ids


@pytest.mark.parametrize(("content", "shown"), SPELLINGS)
def test_a_part_of_a_character_is_spelled_in_bytes(content: bytes, shown: str) -> None:
    assert format_token(content) == shown
