"""Maps token ids to bytes, for any tokenizer.

A text is the concatenation of its tokens' bytes, decoded as UTF-8; streaming uses an incremental
decoder. Sources: GPT-2's `bytes_to_unicode` table (byte-level tokens); sentencepiece's byte
fallback (`<0xE2>`) and space mark.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from tokenizers import Tokenizer

from octavo.api.errors import UnsupportedModel
from octavo.text.pre_tokenization import SPACE
from octavo.utils.byte_level import byte_level_table

Spelling = Literal["byte_level", "sentencepiece"]


def format_token(content: bytes) -> str:
    """Returns a token's bytes as text, with incomplete characters as `<0xE2>`."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before, broken = content[: error.start], content[error.start : error.end]
        spelled = "".join(f"<0x{byte:02X}>" for byte in broken)
        return before.decode() + spelled + format_token(content[error.end :])


class TokenBytes(dict[int, bytes]):
    """Cached token bytes. `strips_space` means that the tokenizer's decoder drops a text's first
    space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._read_spelling, self.strips_space = _read_spelling(tokenizer)
        self._added = {
            i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._table = byte_level_table()

    def __missing__(self, token_id: int) -> bytes:
        """Returns a token's bytes; empty for ids without a token (vocabularies are padded)."""
        known = self[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        text = self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        if self._read_spelling == "byte_level":
            mapped = [self._table.get(character) for character in text]
            return (
                bytes(byte for byte in mapped if byte is not None)
                if None not in mapped
                else text.encode()
            )
        if token_id in self._added:
            return text.encode()
        match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        return bytes([int(match[1], 16)]) if match else text.replace(SPACE, " ").encode()


def _read_spelling(tokenizer: Tokenizer) -> tuple[Spelling, bool]:
    """Returns the token encoding, and whether leading spaces are stripped, from the tokenizer's
    decoder.
    """
    decoder: dict[str, Any] = (
        {"type": "none"}
        if tokenizer.decoder is None
        else json.loads(tokenizer.decoder.__getstate__())
    )
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "Metaspace" in kinds or any(
        part["type"] == "Replace" and part["pattern"] == {"String": SPACE} for part in parts
    ):
        strips = any(
            part["type"] == "Strip" or part.get("prepend_scheme", "never") != "never"
            for part in parts
        )
        return "sentencepiece", strips
    raise UnsupportedModel(
        f"tokenizer decoder: got {decoder['type']}, expected ByteLevel, Metaspace or"
        " SentencePiece's byte fallback"
    )
