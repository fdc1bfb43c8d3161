"""Lower bound of a text's token count without tokenizing, to reject prompts that are far too long.

Valid only for tokenizers in which every byte belongs to a token: byte-level BPE, and BPE with byte
fallback. Others have no bound.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

from octavo.utils.byte_level import byte_level_table

NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
NFC_SHRINKS = 4
"""Maximum number of bytes that NFC combines into one: 3.5 (seven bytes of decomposed U+0390 become
two).
"""


class LengthBound:
    """Lower bound of token counts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Examines every token once, which takes 0.1 s per 50,000."""
        steps = _parts(_state(tokenizer.pre_tokenizer), "pretokenizers")
        is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        shrinks = _normalizer_shrinks(_state(tokenizer.normalizer))
        self._lost = _lost_bytes(tokenizer, is_byte_level=is_byte_level)
        """Bytes that belong to no token and must not be counted."""
        self._bytes_per_token = 0
        """Maximum number of bytes per token; 0 if unbounded."""
        may_lose = shrinks is None or self._lost is None or (shrinks > 1 and self._lost)
        if shrinks is not None and not may_lose and all(map(_keeps_text, steps)):
            self._bytes_per_token = shrinks * _longest_token(tokenizer, is_byte_level=is_byte_level)
        added = tokenizer.get_added_tokens_decoder().values()
        self._drops_spaces = any(token.lstrip or token.rstrip for token in added)
        """Whether a special token may absorb any amount of surrounding whitespace."""

    def fewest_tokens(self, text: str) -> int:
        """Returns a lower bound of the token count; 0 if unknown."""
        if not self._bytes_per_token:
            return 0
        counted = "".join(text.split()) if self._drops_spaces else text
        num_bytes = len(counted.encode(errors="replace").translate(None, delete=self._lost or b""))
        return -(-num_bytes // self._bytes_per_token)


def _lost_bytes(tokenizer: Tokenizer, *, is_byte_level: bool) -> bytes | None:
    """Returns the bytes without tokens, which would be dropped; None if the tokenizer is not
    byte-based.
    """
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    if is_byte_level:
        return bytes(
            byte
            for text, byte in byte_level_table().items()
            if byte not in NEVER_IN_UTF8 and model.token_to_id(text) is None
        )
    falls_back = model.byte_fallback and all(
        model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )
    return b"" if falls_back else None


def _longest_token(tokenizer: Tokenizer, *, is_byte_level: bool) -> int:
    """Returns the length of the longest token in bytes."""
    added = tokenizer.get_added_tokens_decoder()
    longest = max((len(token.content.encode()) for token in added.values()), default=1)
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=False)):
        text = tokenizer.id_to_token(token_id) or ""
        # A byte-level token is spelled with one character for each byte.
        longest = max(longest, len(text) if is_byte_level else len(text.encode()))
    return longest


def _keeps_text(cut: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer keeps every character."""
    if cut["type"] in ("ByteLevel", "Digits", "Metaspace"):
        return True
    return cut["type"] in ("Split", "Punctuation") and cut.get("behavior") != "Removed"


def _normalizer_shrinks(state: dict[str, Any] | None) -> int | None:
    """Returns the maximum number of bytes that a normalizer combines into one; None if it drops
    text.
    """
    factor = 1
    for part in _parts(state, "normalizers"):
        if part["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"].encode()) < len(pattern.encode()):
                return None
        elif part["type"] != "Prepend":
            return None
    return factor


def _parts(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[name] for part in _parts(inner, name)]


def _state(component: Any) -> dict[str, Any] | None:
    """Returns the serialized state of a tokenizer component; None if there is no component."""
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state
