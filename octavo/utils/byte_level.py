"""Characters that stand for bytes in byte-level vocabularies, as GPT-2's `bytes_to_unicode`."""

from __future__ import annotations


def byte_level_table() -> dict[str, int]:
    """Returns the byte of each character in byte-level tokens: printable Latin-1 characters
    represent themselves, characters from U+0100 the other bytes in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
