"""A tokenizer.json as the vocabulary of a GGUF header, and back: the same ids on 2,000 lines of
many scripts, and files that no header can say.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from octavo.api.errors import UnsupportedModel
from octavo.text.json_vocabulary import json_vocabulary
from octavo.text.vocabulary import build_tokenizer
from tests.support.many_scripts import lines
from tests.support.tiny_vocabularies import sentencepiece_source, trained_bpe

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
NUM_LINES = 2000


def published(name: str) -> Tokenizer:
    """Makes a tokenizer that cuts texts as a model's published tokenizer.json does."""
    described = json.loads(trained_bpe().to_str())
    described["model"]["ignore_merges"] = name == "llama-bpe"
    tokenizer = Tokenizer.from_str(json.dumps(described))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        return tokenizer
    cuts = {
        "llama-bpe": (WORDS % "{1,3}",),
        "qwen2": (WORDS % "",),
        "deepseek-v3": DEEPSEEK,
    }.get(name)
    if cuts is None:
        tokenizer.pre_tokenizer = byte_level
        return tokenizer
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_alone])
    return tokenizer


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-v3"])
def test_ids_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    original = published(name)
    original.save(str(tmp_path / "tokenizer.json"))
    vocabulary = json_vocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.model == "gpt2" and vocabulary.pre == name
    built = build_tokenizer(vocabulary, tmp_path).tokenizer
    texts = list(lines(NUM_LINES))
    assert len({"".join(text.split()) for text in texts}) > 0.98 * NUM_LINES
    wanted = original.encode_batch(texts, add_special_tokens=False)
    found = built.encode_batch(texts, add_special_tokens=False)
    wrong = [t for t, a, b in zip(texts, wanted, found, strict=True) if a.ids != b.ids]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_ids_of_sentencepiece(tmp_path: Path, dummy_prefix: bool) -> None:
    """Scores are made of the merges' order. With a prefix there are no defined tokens, behind which
    tokenizer.json would put it again.
    """
    source = sentencepiece_source(dummy_prefix).vocabulary
    assert source is not None
    if dummy_prefix:
        source = replace(source, types=[1 if kind == 4 else kind for kind in source.types])
    original = build_tokenizer(source, tmp_path).tokenizer
    parts = [normalizers.Prepend("\u2581")] if dummy_prefix else []
    original.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "\u2581")])
    original.save(str(tmp_path / "tokenizer.json"))
    vocabulary = json_vocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.model == "llama" and vocabulary.add_space_prefix == dummy_prefix
    built = build_tokenizer(vocabulary, tmp_path)
    for text in lines(NUM_LINES):
        found = built.tokenizer.encode(" " * built.space_prefix + text, add_special_tokens=False)
        assert found.ids == original.encode(text, add_special_tokens=False).ids, text


def test_a_cut_that_no_header_names(tmp_path: Path) -> None:
    tokenizer = published("gpt-2")
    cut = pre_tokenizers.Split(Regex(r"[aeiou]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, tokenizer.pre_tokenizer])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match=r"none of the \d\d known pre-tokenizers"):
        json_vocabulary(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["", "{}", '{"model": {"type": "Unigram"}}', "[1]"])
def test_a_file_that_is_no_such_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="its model cannot be read"):
        json_vocabulary(tmp_path / "tokenizer.json")
