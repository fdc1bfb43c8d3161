"""Checkpoints that bring tokenizer.model alone: the ids are those of SentencePiece itself."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from octavo.api.errors import OctavoError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.hf_tokenizer import CHATGLM_TOKENS, tokenizer_source
from octavo.text.tokenizer import load_tokenizer

OPTICKS = Path(__file__).parents[1] / "data" / "opticks.txt"
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TEXTS = [
    "The Rays of Light",
    " two  spaces   and a tab\t.",
    "ünïcödé, 光 and 🌈",
    "numbers 12345 and\nlines\n\n",
    "",
    "x",
    "▁ a mark of its own",
]


@cache
def model_bytes(**options) -> bytes:
    """Trains a tiny model on Newton's Opticks; returns its file."""
    lines = OPTICKS.read_text(encoding="utf-8").splitlines()[:400]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=written,
        **{
            "vocab_size": 700,
            "model_type": "bpe",
            "byte_fallback": True,
            "minloglevel": 2,
            "num_threads": 1,
            **PLAIN,
            **options,
        },
    )
    return written.getvalue()


def save(folder: Path, data: bytes, **settings) -> Path:
    (folder / "tokenizer.model").write_bytes(data)
    base = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | settings))
    return folder


def tokenizer_of(folder: Path, config: dict | None = None):
    return load_tokenizer(tokenizer_source(folder, config or {}, {}))


@pytest.mark.parametrize(
    "options",
    [{}, {"add_dummy_prefix": False}, {"byte_fallback": False}, {"user_defined_symbols": "<sep>"}],
    ids=str,
)
def test_ids_are_sentencepieces(tmp_path, options):
    data = model_bytes(**options)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    found = tokenizer_of(save(tmp_path, data))
    draw = np.random.default_rng(3)
    text = OPTICKS.read_text(encoding="utf-8")
    starts = draw.integers(0, len(text) - 300, 40)
    for sample in [*TEXTS, "a<sep>b", *(text[i : i + 300] for i in starts)]:
        wanted = oracle.encode(sample)
        assert found.encode(sample, add_special_tokens=False) == wanted, sample
        assert found.encode(sample) == [oracle.bos_id(), *wanted]
        if oracle.unk_id() not in wanted:  # shown as a mark by SentencePiece, left out here
            assert found.decode(wanted) == oracle.decode(wanted)


def test_added_tokens_stand_behind_the_pieces(tmp_path):
    data = model_bytes()
    added = {
        "700": {"content": "<|im_start|>", "special": True},
        "703": {"content": "[tool]", "special": False},
    }
    found = tokenizer_of(save(tmp_path, data, added_tokens_decoder=added))
    assert found.vocab_size == 704
    ids = found.encode("<|im_start|>x[tool]", allow_special_text=True, add_special_tokens=False)
    assert ids[0] == 700
    assert ids[-1] == 703
    assert 700 not in found.encode("<|im_start|>x", add_special_tokens=False)


def test_chatglm_adds_its_own_tokens_and_prefix(tmp_path):
    """ChatGLM's own code numbers its special tokens behind the pieces and begins every text with
    two of them.
    """
    data = model_bytes()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    found = tokenizer_of(save(tmp_path, data), {"model_type": "chatglm"})
    wanted = [700 + CHATGLM_TOKENS.index(name) for name in ("[gMASK]", "sop")]
    assert found.encode("The Rays") == [*wanted, *oracle.encode("The Rays")]
    assert found.encode("The Rays", add_special_tokens=False) == oracle.encode("The Rays")


def test_tokenizer_json_comes_first(tmp_path):
    save(tmp_path, b"not read")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_source(tmp_path, {}, {}).vocabulary is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "of type 'unigram', expected 'bpe'"),
        ({"normalization_rule_name": "nmt_nfkc"}, "that normalize text"),
        ({"remove_extra_whitespaces": True}, "that normalize text"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(UnsupportedModel, match=message):
        tokenizer_of(save(tmp_path, model_bytes(**options)))


def test_a_damaged_file_is_one_clear_error(tmp_path):
    data = model_bytes()
    draw = np.random.default_rng(5)
    for _ in range(60):
        damaged = bytearray(data[: draw.integers(0, len(data))])
        for at in draw.integers(0, max(len(damaged), 1), 3):
            damaged[at : at + 1] = bytes([draw.integers(256)])
        try:
            tokenizer_of(save(tmp_path, bytes(damaged)))
        except OctavoError:
            continue


@pytest.mark.parametrize("added", [{"x": 1}, {"700": "text"}, {"700": {"content": 5}}, [1]])
def test_added_tokens_of_another_form_are_refused(tmp_path, added):
    with pytest.raises(WeightMismatch, match="added tokens"):
        tokenizer_of(save(tmp_path, model_bytes(), added_tokens_decoder=added))
