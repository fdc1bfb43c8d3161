"""A saved conversation: messages, system message and sampling parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.api.errors import ConfigError
from octavo.config.data_file import read_data_file

MAX_BYTES = 64 << 20
"""Maximum size of a file in bytes."""


class SavedMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str


class SavedChat(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[SavedMessage]
    system: str | None = None
    sampling: dict[str, Any] = {}


def read_chat(path: Path) -> SavedChat:
    """Reads a conversation; raises ConfigError if the file is not one."""
    file = read_data_file(path, name="chat", max_bytes=MAX_BYTES, kind="JSON")
    chat = file.convert(SavedChat, hint="give a file that /save has written")
    if [one.role for one in chat.messages] != ["user", "assistant"] * (len(chat.messages) // 2):
        raise ConfigError(f"{path}: holds no conversation: questions and answers take turns")
    return chat


def write_chat(path: Path, chat: SavedChat) -> None:
    """Writes a conversation, readable only by its owner; overwrites only another conversation."""
    if path.exists():
        read_chat(path)
    text = msgspec.json.format(msgspec.json.encode(chat), indent=2)
    new = path.with_name(f".{path.name}.new")
    try:
        with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text + b"\n")
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
