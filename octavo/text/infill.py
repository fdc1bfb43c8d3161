"""Fill-in-the-middle prompt formats, detected by vocabulary tokens.

Source: model cards (Qwen2.5-Coder, StarCoder, CodeLlama, DeepSeek-Coder, CodeGemma, Codestral,
GLM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenOf = Callable[[str], int | None]
"""Maps a token's text to its id; None if there is no such token."""


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """A fill-in-the-middle format, as token ids."""

    name: str
    before_prefix: int
    before_suffix: int
    end: int | None
    """Token after both texts; None if the model continues the prefix."""

    def arrange(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Returns the prompt's ids; without an end token the prefix comes last."""
        if self.end is None:
            return [self.before_suffix, *suffix, self.before_prefix, *prefix]
        return [self.before_prefix, *prefix, self.before_suffix, *suffix, self.end]


FORMATS: tuple[tuple[str, str, str, str | None], ...] = (
    ("qwen", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("starcoder", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("starcoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("deepseek", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("codellama", "▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("glm", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("mistral", "[PREFIX]", "[SUFFIX]", None),
)
"""Rows of (name, prefix token, suffix token, middle token)."""


def find_infill_format(token_of: TokenOf) -> InfillFormat | None:
    """Returns the first format whose tokens are in the vocabulary; None if there is none."""
    for name, *texts in FORMATS:
        wanted = [text for text in texts if text is not None]
        ids = [token_id for text in wanted if (token_id := token_of(text)) is not None]
        if len(ids) == len(wanted):
            return InfillFormat(name, ids[0], ids[1], ids[2] if len(ids) > 2 else None)
    return None
