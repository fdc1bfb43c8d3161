"""Small tokenizers trained at test time: byte-level BPE by `tokenizers`, SentencePiece BPE by
sentencepiece itself.
"""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.checkpoint.ports import TokenizerSource, Vocabulary

TEXT = (Path(__file__).parents[1] / "data" / "opticks.txt").read_text(encoding="utf-8")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEFINED = ["\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<table>"]
"""User-defined tokens as Gemma has them: runs of blanks, and tags."""


@cache
def trained_bpe() -> Tokenizer:
    """Trains a byte-level BPE of 700 tokens without any cut of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    numbers = " ".join(str(i * 37) for i in range(4000))
    tokenizer.train_from_iterator([TEXT, numbers, "I'LL we'll IT'S " * 200], trainer)
    return tokenizer


def bpe_source(pre: str, **changes) -> TokenizerSource:
    """Returns the trained BPE as a GGUF header would hold it."""
    model = json.loads(trained_bpe().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    vocabulary = Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=[token.encode() for token in tokens],
        types=[3 if token in SPECIAL else 1 for token in tokens],
        merges=[" ".join(merge).encode() for merge in model["merges"]],
    )
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return TokenizerSource(
        Path("m.gguf"),
        **{"vocabulary": vocabulary, "special_tokens": special, "eos_token_ids": (2,)} | changes,
    )


def save_tokenizer_json(path: Path, tokenizer: Tokenizer, **settings) -> Path:
    """Writes a directory as transformers saves it."""
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}} | settings)
    )
    return path


def bpe_with_specials() -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_bpe().to_str())
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    return tokenizer


@cache
def trained_sentencepiece(dummy_prefix: bool) -> bytes:
    """Trains and serialises a BPE of 900 pieces with byte fallback, user-defined runs of blanks,
    and no normalisation.
    """
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        user_defined_symbols=DEFINED,
        minloglevel=2,
    )
    return out.getvalue()


def sentencepiece_source(dummy_prefix: bool, **changes) -> TokenizerSource:
    """Returns the trained pieces as a GGUF header would hold them (spaces of user-defined pieces as
    they are).
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(trained_sentencepiece(dummy_prefix))
    texts = [
        piece.piece.replace("\u2581", " ") if piece.type == 4 else piece.piece
        for piece in proto.pieces
    ]
    vocabulary = Vocabulary(
        model="llama",
        pre="default",
        tokens=[text.encode() for text in texts],
        types=[piece.type for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        add_space_prefix=dummy_prefix,
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return TokenizerSource(
        Path("m.gguf"),
        **{"vocabulary": vocabulary, "special_tokens": special, "eos_token_ids": (2,)} | changes,
    )
