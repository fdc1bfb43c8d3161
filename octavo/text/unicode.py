"""What is known of a text before it is tokenized: whether it is Unicode, and whether it is long."""

from __future__ import annotations

from octavo.api.errors import InvalidRequest

LONG_TEXT_CHARACTERS = 20_000
"""Length from which a text is long: at 1 to 2 MB/s, shorter ones are tokenized in some 10 ms."""


def is_long(text: str) -> bool:
    """Tells whether a text takes so long to tokenize that others should not wait for it."""
    return len(text) > LONG_TEXT_CHARACTERS


def check_unicode(text: str, name: str = "prompt") -> None:
    """Raises InvalidRequest where a character has no code in UTF-8: bytes that were no UTF-8 arrive
    as halves of surrogate pairs.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{name}: got {text[error.start]!r} as character {error.start}, allowed is Unicode text"
        )
        raise InvalidRequest(message, hint="write the text in UTF-8", param=name) from None
