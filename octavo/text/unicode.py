"""Checks on text before tokenization: valid Unicode, and length."""

from __future__ import annotations

from octavo.api.errors import InvalidRequest

LONG_TEXT_CHARACTERS = 20_000
"""Length in characters from which a text counts as long; shorter ones take up to about 10 ms to
tokenize, at 1 to 2 MB/s.
"""


def is_long(text: str) -> bool:
    """Returns whether tokenizing a text would delay other requests."""
    return len(text) > LONG_TEXT_CHARACTERS


def check_unicode(text: str, name: str = "prompt") -> None:
    """Raises InvalidRequest for characters that UTF-8 cannot encode (lone surrogates, from invalid
    bytes).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{name}: got {text[error.start]!r} as character {error.start}, expected Unicode text"
        )
        raise InvalidRequest(message, hint="write the text in UTF-8", param=name) from None
