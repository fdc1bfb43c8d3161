"""Seeded lines of many scripts: letters, digits, marks, punctuation and blanks in any mixture."""

from __future__ import annotations

import random
from collections.abc import Iterator

SCRIPTS = (
    (0x61, 0x7A),  # Latin
    (0x41, 0x5A),
    (0xC0, 0x17F),
    (0x370, 0x3FF),  # Greek
    (0x400, 0x4FF),  # Cyrillic
    (0x531, 0x587),  # Armenian
    (0x5D0, 0x5EA),  # Hebrew
    (0x620, 0x6D3),  # Arabic, with its digits and marks
    (0x900, 0x97F),  # Devanagari
    (0x980, 0x9DF),  # Bengali
    (0xB80, 0xBF9),  # Tamil
    (0xE01, 0xE5B),  # Thai
    (0x10D0, 0x10FF),  # Georgian
    (0x1200, 0x137C),  # Ethiopic
    (0x1780, 0x17F9),  # Khmer
    (0x3041, 0x30FF),  # kana
    (0x4E00, 0x9FA5),  # Han
    (0xAC00, 0xD7A3),  # Hangul
    (0xFF01, 0xFF9F),  # wide and half forms
    (0x1F300, 0x1F64F),  # pictures
)
MARKS = (0x300, 0x36F)
DIGITS = ("0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "½²Ⅷ①")
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~«»“”‘’…—¿¡。、！？،؛।€£¥°±×÷→∑√"
BLANKS = (
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "\u00a0",
    "\u3000",
    " \n",
    "\u200d",
)
ENDINGS = ("'s", "'t", "'re", "'VE", "'m", "'LL", "'d", "\u2019s")


def lines(count: int, seed: int = 0) -> Iterator[str]:
    """Yields lines, each of one to three scripts."""
    draw = random.Random(seed)
    for _ in range(count):
        scripts = draw.sample(SCRIPTS, draw.randint(1, 3))
        yield "".join(_part(draw, scripts) for _ in range(draw.randint(1, 24)))


def _part(draw: random.Random, scripts: list[tuple[int, int]]) -> str:
    kind = draw.random()
    if kind < 0.45:
        word = "".join(_letter(draw, scripts) for _ in range(draw.randint(1, 9)))
        return word + (draw.choice(ENDINGS) if draw.random() < 0.1 else "")
    if kind < 0.75:
        return draw.choice(BLANKS)
    if kind < 0.87:
        return "".join(draw.choice(draw.choice(DIGITS)) for _ in range(draw.randint(1, 7)))
    return "".join(draw.choice(PUNCTUATION) for _ in range(draw.randint(1, 4)))


def _letter(draw: random.Random, scripts: list[tuple[int, int]]) -> str:
    letter = chr(draw.randint(*draw.choice(scripts)))
    return letter + (chr(draw.randint(*MARKS)) if draw.random() < 0.03 else "")
