"""Reads `tokenizer.model`, SentencePiece's own file, into a vocabulary.

Llama 2, Mistral, Gemma and ChatGLM are published with it, some of them with nothing else. The file
is a protobuf message of which a dozen fields matter; they are read here, so that no protobuf
package is needed. Source of the numbers of fields: sentencepiece's `sentencepiece_model.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint_ports import CONTROL, NORMAL, UNUSED, USER_DEFINED, Vocabulary
from octavo.errors import UnsupportedModel, WeightMismatch

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""

BPE = 2
"""Number of byte-pair encoding among the trainer's model types."""
MODEL_TYPES = {1: "unigram", BPE: "bpe", 3: "word", 4: "char"}

CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
"""Tokens that ChatGLM's own code adds behind the pieces, in this order."""

CHATGLM_PREFIX = ("[gMASK]", "sop")
"""Tokens that ChatGLM's own code puts before every text."""

MAX_PIECES = 1 << 21

AddedTokens = Mapping[int, tuple[str, bool]]
"""Tokens beside the pieces by id: the text, and whether it is special."""


def read_vocabulary(path: Path, added_behind: Callable[[int], AddedTokens]) -> Vocabulary:
    """Returns the pieces of the file, and behind them the tokens that are added to that many.
    UnsupportedModel names a kind other than BPE, WeightMismatch a damaged file.
    """
    try:
        data = path.read_bytes()
        message = _message(data)
        pieces = [_piece(part) for part in message.get(1, [])]
        trainer = _message(message[2][0]) if 2 in message else {}
        normalizer = _message(message[3][0]) if 3 in message else {}
    except (OSError, ValueError, struct.error) as error:
        raise WeightMismatch(
            f"{path}: not a SentencePiece model that can be read: {error}",
            hint="download the file again",
        ) from error
    kind = trainer.get(3, [1])[0]
    if kind != BPE:
        raise UnsupportedModel(
            f"{path}: a SentencePiece model of kind {MODEL_TYPES.get(kind, kind)!r}, supported is"
            " 'bpe'",
            hint="save the tokenizer with transformers, which writes tokenizer.json",
        )
    # Both change texts: a table of characters, and the removal of double spaces (the default).
    if normalizer.get(2, [b""])[0] or normalizer.get(4, [1])[0]:
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
        add_space_prefix=bool(normalizer.get(3, [1])[0]),
    )


def chatglm_tokens(num_pieces: int) -> AddedTokens:
    """Returns the tokens that ChatGLM's own code adds behind `num_pieces` pieces."""
    return {num_pieces + i: (text, True) for i, text in enumerate(CHATGLM_TOKENS)}


def _added_pieces(path: Path, first: int, added: AddedTokens) -> list[tuple[bytes, float, int]]:
    """Returns the added tokens behind the pieces, and an unused piece for each id between them."""
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


def _piece(data: bytes) -> tuple[bytes, float, int]:
    """Returns a piece's text, score and type."""
    fields = _message(data)
    (score,) = struct.unpack("<f", fields.get(2, [bytes(4)])[0])
    return fields.get(1, [b""])[0], score, fields.get(3, [NORMAL])[0]


def _message(data: bytes) -> dict[int, list[Any]]:
    """Returns the values of a message's fields by number, in order: ints, or bytes."""
    fields: dict[int, list[Any]] = {}
    for number, value in _fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, value) of each field; ValueError where the data end within one."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {wire}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes ends behind the file")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at an offset, and the offset behind it."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number without an end")
