"""Reads tekken.json, Mistral's file of a byte-level BPE tokenizer, which has ranks of tokens but no
merges. Source of the format: mistral-common.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.ports import CONTROL, NORMAL, Vocabulary
from octavo.utils.byte_level import byte_level_table

FILE = "tekken.json"
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization of all published files."""

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{% elif message.role == 'user' %}[INST]"
    "{% endif %}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]"
    "{% elif part.type == 'image' %}[IMG]"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message.role == 'system' %}[/SYSTEM_PROMPT]{% elif message.role == 'user' %}[/INST]"
    "{% else %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
"""Chat template of the versions from 7 on, without tools; no other file of these models has one."""


def read_tekken(path: Path) -> Vocabulary:
    """Returns the vocabulary; raises UnsupportedModel for a file of another pre-tokenization or
    without special tokens, and WeightMismatch for a damaged file.
    """
    content = read_json(path)
    try:
        config, special = content["config"], content.get("special_tokens")
        num_special = int(config["default_num_special_tokens"])
        num_tokens = int(config["default_vocab_size"]) - num_special
        if config["pattern"] != PATTERN or not special:
            raise UnsupportedModel(
                f"{path}: got version {config.get('version')!r} of the format, supported: those"
                " with special_tokens and the pattern of version 7",
                hint="save the tokenizer with transformers, which writes tokenizer.json",
            )
        names = {int(token["rank"]): str(token["token_str"]) for token in special}
        pieces = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][:num_tokens]]
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise WeightMismatch(
            f"{path}: cannot be read: {type(error).__name__}: {error}",
            hint="download the file again",
        ) from error
    texts = [names.get(i, f"<SPECIAL_{i}>").encode() for i in range(num_special)]
    characters = {byte: text.encode() for text, byte in byte_level_table().items()}
    return Vocabulary(
        model="gpt2",
        pre="tekken",
        tokens=[*texts, *(_spell(piece, characters) for piece in pieces)],
        types=[CONTROL] * num_special + [NORMAL] * len(pieces),
        merges=[
            _spell(left, characters) + b" " + _spell(right, characters)
            for left, right in _merges(pieces)
        ],
    )


def _merges(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Returns all pairs of tokens that make up a token, in the order of the tokens' ranks, so that
    merging the first applicable pair merges the one of lowest rank.
    """
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges: list[tuple[bytes, bytes]] = []
    for piece in pieces:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _spell(piece: bytes, characters: Mapping[int, bytes]) -> bytes:
    return b"".join([characters[byte] for byte in piece])


def tekken_settings() -> dict[str, Any]:
    """Returns what tokenizer_config.json says of other models."""
    return {**SPECIAL_TOKENS, "add_bos_token": True, "chat_template": TEMPLATE}
