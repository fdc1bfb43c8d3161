"""Images in the messages of all dialects, in the plain form that the engine's front reads.

Knows where dialects put an image. Whether the model reads any, and what is wrong with one, the
engine's front says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.api.errors import InvalidRequest, shown

Content = str | list[dict[str, Any]]
"""Content of a plain message: a text, or parts where there are images among the texts."""


def image_part(source: str) -> dict[str, Any]:
    """Returns the plain part of an image: a data URL, an address or a file's name."""
    return {"type": "image", "image": source}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def base64_source(data: str, media_type: str = "image/png") -> str:
    """Returns the data URL of an image in base64."""
    return f"data:{media_type};base64,{data}"


def content_of(parts: Sequence[dict[str, Any]]) -> Content:
    """Returns parts as they are where there is an image among them, else their texts, each on lines
    of its own.
    """
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether any plain message holds an image."""
    return any(isinstance(message.get("content"), list) for message in messages)


def url_source(given: object, where: str) -> str:
    """Returns the source that OpenAI's form of an image names."""
    if isinstance(given, Mapping):
        given = given.get("url")
    if not isinstance(given, str):
        raise InvalidRequest(
            f"{where}: got {shown(given)}, allowed is an object with a url",
            hint="write it as {'url': 'data:image/png;base64,...'}",
            param=where,
        )
    return given


def block_source(given: object, where: str) -> str:
    """Returns the source that Anthropic's form of an image names."""
    source = given if isinstance(given, Mapping) else {}
    kind = source.get("type")
    if kind == "base64" and isinstance(source.get("data"), str):
        return base64_source(source["data"], str(source.get("media_type") or "image/png"))
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    raise InvalidRequest(
        f"{where}: got {shown(given)}, allowed are {{'type': 'base64', 'media_type', 'data'}} and"
        " {'type': 'url', 'url'}",
        param=where,
    )
