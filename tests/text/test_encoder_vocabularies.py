"""Tokenizers that encoders and T5 have in GGUF headers give the ids of those they came from: the
WordPiece of a tokenizer.json, and SentencePiece's unigram model.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from octavo.api.errors import WeightMismatch
from octavo.api.pooling_params import TextPair
from octavo.checkpoint.ports import TokenizerSource, Vocabulary
from octavo.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiers import examples
from tests.support.tiny_encoders import header_words, save_word_tokenizer
from tests.support.tiny_vocabularies import TEXT

TEXTS = st.text(alphabet="abcXYZ éÄ.,!? \t中😀1", max_size=40)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TextTokenizer]:
    """Returns BERT's tokenizer, and the one of a header with its words."""
    folder = tmp_path_factory.mktemp("words")
    save_word_tokenizer(folder)
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spelled = header_words(folder)
    vocabulary = Vocabulary(
        model="bert",
        pre="default",
        tokens=[word.encode() for word in spelled],
        types=[3 if word.startswith("[") else 1 for word in spelled],
        prefix=("[CLS]",),
        suffix=("[SEP]",),
    )
    return original, load_tokenizer(TokenizerSource(Path("m.gguf"), vocabulary=vocabulary))


def test_words_have_berts_ids(words: tuple[Tokenizer, TextTokenizer]) -> None:
    original, ours = words

    @settings(max_examples=examples(40), deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert ours.encode(text) == original.encode(text).ids

    check()


def test_a_pair_has_berts_segments(words: tuple[Tokenizer, TextTokenizer]) -> None:
    original, ours = words
    found = ours.encode_pair(TextPair("a b", "c d e"))
    wanted = original.encode("a b", "c d e")
    assert (found.token_ids, found.type_ids) == (wanted.ids, wanted.type_ids)


@cache
def trained_unigram() -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=out,
        model_type="unigram",
        vocab_size=500,
        minloglevel=2,
        pad_id=3,
    )
    return out.getvalue()


def unigram_vocabulary() -> Vocabulary:
    """Returns the trained pieces as llama.cpp's converter writes those of a T5."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(trained_unigram())
    return Vocabulary(
        model="t5",
        pre="default",
        tokens=[piece.piece.encode() for piece in proto.pieces],
        types=[piece.type for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        add_space_prefix=proto.normalizer_spec.add_dummy_prefix,
        suffix=("</s>",),
        charsmap=proto.normalizer_spec.precompiled_charsmap,
        removes_spaces=proto.normalizer_spec.remove_extra_whitespaces,
    )


def test_pieces_have_sentencepieces_ids() -> None:
    original = sentencepiece.SentencePieceProcessor(model_proto=trained_unigram())
    ours = load_tokenizer(TokenizerSource(Path("m.gguf"), vocabulary=unigram_vocabulary()))

    @settings(max_examples=examples(40), deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert ours.encode(text) == [*original.encode(text), original.eos_id()]

    check()
    line = TEXT.splitlines()[3].strip()
    assert ours.encode(line) == [*original.encode(line), original.eos_id()]
    assert ours.decode(ours.encode(line)) == original.decode(original.encode(line))


def test_text_that_spells_a_control_token_is_text() -> None:
    ours = load_tokenizer(TokenizerSource(Path("m.gguf"), vocabulary=unigram_vocabulary()))
    for text in ("a</s>b", "</s>", "the<s>light", "<unk> <pad>"):
        ids = ours.encode(text, add_special_tokens=False)
        assert not ours.special_token_ids.intersection(ids) - {0}, text
    assert ours.encode("the</s>", add_special_tokens=False, allow_special_text=True)[-1] == 2


def test_case_and_accents_are_the_headers() -> None:
    tokens = ["[UNK]", "▁hello", "▁Hello", "▁cafe", "▁café", "▁Café"]
    plain = Vocabulary("bert", "default", [each.encode() for each in tokens], [2, 1, 1, 1, 1, 1])

    def ids(**changes: bool) -> list[int]:
        source = TokenizerSource(Path("m.gguf"), vocabulary=replace(plain, **changes))
        return load_tokenizer(source).encode("Hello Café")

    assert ids() == [1, 3] == ids(lowercase=True)
    assert ids(lowercase=False) == [2, 5]
    assert ids(lowercase=True, strips_accents=False) == [1, 4]


def test_a_vocabulary_without_an_unknown_word_is_refused() -> None:
    vocabulary = Vocabulary("bert", "default", [b"\xe2\x96\x81a"], [1])
    with pytest.raises(WeightMismatch, match=r"has no token \[UNK\]"):
        load_tokenizer(TokenizerSource(Path("m.gguf"), vocabulary=vocabulary))
