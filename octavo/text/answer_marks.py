"""Markers of a model's output format that the detokenizer needs.

The server derives them from the model's formats; parsers read the text between them.
"""

from __future__ import annotations

import msgspec


class AnswerMarks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output markers of one request."""

    shown_token_ids: list[int] = []
    """Special tokens to show even if other special tokens are skipped."""
    reasoning_opening: str = ""
    """Text that starts the reasoning; "" if the model does not reason."""
    reasoning_closing: str = ""
    begins_in_reasoning: bool = False
    """Whether the prompt already contains the opening marker."""
