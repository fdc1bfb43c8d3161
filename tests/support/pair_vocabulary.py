"""Vocabularies that show where a text is split: tokens for random pairs of letters.

Whether two letters that could merge do so tells whether there is a border between them. Whole words
that no merge makes tell whether a word that is a token is merged from its letters
(`ignore_merges`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import pre_tokenizers

from octavo.checkpoint.ports import Vocabulary
from octavo.text.pre_tokenization import PRE_TOKENIZATIONS, SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BOS, SEPARATOR = "<|bos|>", "<|separator|>"
"""A control token, and a user-defined one that parts the texts of one file."""
NUM_PAIRS = 20_000
NUM_LINES = 400
"""Seeded lines of which the reference has digests."""
DATA = Path(__file__).parents[1] / "data" / "pre_tokenizers.json"
"""Reference: llama.cpp's ids, which `dump_pre_tokenizers.py` writes."""
WORDS = (" normal", " concatenated", "concatenated", " emojis", " there", "apple", "3333", " 333")
WORDS += ("\n\n", "\n\n\n", "''''''", "......", " \t", "    ", "工作", "ที่", "កាន់", "'ve", "Hello")


def digest_of(ids: Sequence[int]) -> str:
    """Returns 16 bits of a digest of token ids, in hexadecimal."""
    return f"{zlib.crc32(repr(list(ids)).encode()) & 0xFFFF:04x}"


@cache
def pair_vocabulary(pre: str) -> Vocabulary:
    """Returns the vocabulary of a pre-tokenization: of bytes, or of text where it has no bytes."""
    if PRE_TOKENIZATIONS[pre].is_byte_level:
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = [to_bytes.pre_tokenize_str(word)[0][0] for word in WORDS]
        return _with_pairs(pre, sorted(to_bytes.alphabet()), words)
    letters = [chr(code) for code in range(33, 127)]
    letters += [SPACE, *"éÉßøñàçабвгджзиклмнорстуПР我想在工作天名字日本語かな한국어กขคงจ"]
    lines = ["\n" * count for count in range(1, 32)]
    words = [word.replace(" ", SPACE) for word in WORDS if "\n" not in word and "\t" not in word]
    return _with_pairs(pre, letters, [*lines, *words], bytes_apart=True)


def _with_pairs(
    pre: str, letters: Sequence[str], words: Sequence[str], *, bytes_apart: bool = False
) -> Vocabulary:
    pairs = [(left, right) for left in letters for right in letters]
    merges = random.Random(0).sample(pairs, min(NUM_PAIRS, len(pairs) // 2))
    types = {"<unk>": UNKNOWN, BOS: CONTROL, SEPARATOR: USER_DEFINED}
    if bytes_apart:
        types |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    types |= dict.fromkeys([*letters, *map("".join, merges), *words], NORMAL)
    return Vocabulary(
        model="whitespace" if pre == "whitespace" else "gpt2",
        pre=pre,
        tokens=[token.encode() for token in types],
        types=list(types.values()),
        merges=[" ".join(merge).encode() for merge in merges],
    )
