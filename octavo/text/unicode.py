"""Whether what a user gives as a text is one: every character has a code, and a code in UTF-8."""

from __future__ import annotations

from octavo.errors import InvalidRequest


def check_unicode(text: str, name: str = "prompt") -> None:
    """InvalidRequest where the text holds what no text does: bytes that were no UTF-8 arrive as
    halves of surrogate pairs.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = (
            f"{name}: got {text[error.start]!r} as character {error.start}, allowed is Unicode text"
        )
        raise InvalidRequest(message, hint="write the text in UTF-8", param=name) from None
