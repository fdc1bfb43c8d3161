"""Marks of a model's own format of answers, as the detokenizer must know them.

The server makes them of the model's formats; what stands between the marks is read elsewhere.
"""

from __future__ import annotations

import msgspec


class AnswerMarks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Marks within the answers of one request."""

    shown_token_ids: list[int] = []
    """Special tokens whose text is shown where others are left out."""
    reasoning_opening: str = ""
    """Text with which an answer's reasoning begins; "" where the model does not reason."""
    reasoning_closing: str = ""
    begins_in_reasoning: bool = False
    """Whether the prompt has opened the reasoning already."""
