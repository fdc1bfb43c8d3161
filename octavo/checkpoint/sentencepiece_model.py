"""Reads `tokenizer.model`, SentencePiece's file, into a vocabulary.

Llama 2, Mistral, Gemma and ChatGLM are published with it, some with nothing else. The file is a
protobuf message; sentencepiece, which parses it, is imported lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.ports import CONTROL, UNUSED, USER_DEFINED, Vocabulary

BPE = 2
"""Number of byte-pair encoding among the trainer's model types."""
MODEL_TYPES = {1: "unigram", BPE: "bpe", 3: "word", 4: "char"}

CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
"""Tokens that ChatGLM's code adds after the pieces, in this order."""

CHATGLM_PREFIX = ("[gMASK]", "sop")
"""Tokens that ChatGLM's code puts before every text."""

MAX_PIECES = 1 << 21

AddedTokens = Mapping[int, tuple[str, bool]]
"""Added tokens by id: the text, and whether it is special."""


def read_vocabulary(path: Path, added_behind: Callable[[int], AddedTokens]) -> Vocabulary:
    """Returns the pieces of the file, followed by the tokens that `added_behind` returns for their
    number.

    Raises UnsupportedModel for model types other than BPE, WeightMismatch for a damaged file.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    message = ModelProto()
    try:
        message.ParseFromString(path.read_bytes())
        pieces = [(one.piece.encode(), one.score, one.type) for one in message.pieces]
    except AttributeError as error:  # protobuf gives bytes for a text that is not UTF-8
        raise WeightMismatch(
            f"{path}: a piece is not UTF-8", hint="download the file again"
        ) from error
    except (OSError, DecodeError) as error:
        raise WeightMismatch(
            f"{path}: not a SentencePiece model that can be read: {error}",
            hint="download the file again",
        ) from error
    kind = message.trainer_spec.model_type
    if kind != BPE:
        raise UnsupportedModel(
            f"{path}: a SentencePiece model of kind {MODEL_TYPES.get(kind, kind)!r}, supported is"
            " 'bpe'",
            hint="save the tokenizer with transformers, which writes tokenizer.json",
        )
    # Both change texts: a table of characters, and the removal of double spaces (the default).
    normalizer = message.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise UnsupportedModel(
            f"{path}: a SentencePiece model that normalises texts, supported is none",
            hint="save the tokenizer with transformers, which writes tokenizer.json",
        )
    pieces += _added_pieces(path, len(pieces), added_behind(len(pieces)))
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=[text for text, _, _ in pieces],
        types=[kind for _, _, kind in pieces],
        scores=[score for _, score, _ in pieces],
        add_space_prefix=normalizer.add_dummy_prefix,
    )


def chatglm_tokens(num_pieces: int) -> AddedTokens:
    """Returns the tokens that ChatGLM's code adds after `num_pieces` pieces."""
    return {num_pieces + i: (text, True) for i, text in enumerate(CHATGLM_TOKENS)}


def _added_pieces(path: Path, first: int, added: AddedTokens) -> list[tuple[bytes, float, int]]:
    """Returns the added tokens after the pieces, with an unused piece for each id between them."""
    behind = {token_id: token for token_id, token in added.items() if token_id >= first}
    end = max(behind, default=first - 1) + 1
    if end > MAX_PIECES:
        raise WeightMismatch(f"{path}: an added token has id {end - 1}, allowed are {MAX_PIECES}")
    pieces = []
    for token_id in range(first, end):
        text, is_special = behind.get(token_id, (f"<unused of id {token_id}>", None))
        kind = UNUSED if is_special is None else CONTROL if is_special else USER_DEFINED
        pieces.append((text.encode(), 0.0, kind))
    return pieces
