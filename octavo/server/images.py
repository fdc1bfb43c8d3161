"""Converts images in messages of all APIs to plain parts.

The frontend checks whether the model supports images, and validates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.api.errors import InvalidRequest, shown

Content = str | list[dict[str, Any]]
"""Content of a plain message: a text, or parts if it contains images."""


def image_part(source: str) -> dict[str, Any]:
    """Returns the plain part of an image, given by data URL, URL or file name."""
    return {"type": "image", "image": source}


def video_part(source: str) -> dict[str, Any]:
    """Returns the plain part of a video, given by data URL, URL or file name."""
    return {"type": "video", "video": source}


def audio_part(source: str) -> dict[str, Any]:
    """Returns the plain part of an audio, given by data URL, URL or file name."""
    return {"type": "audio", "audio": source}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def base64_source(data: str, media_type: str = "image/png") -> str:
    """Returns the data URL of a base64 image."""
    return f"data:{media_type};base64,{data}"


def join_parts(parts: Sequence[dict[str, Any]]) -> Content:
    """Returns the parts unchanged if any is an image, video or audio, else their joined texts."""
    if any(part["type"] != "text" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether any plain message contains an image."""
    return any(isinstance(message.get("content"), list) for message in messages)


def url_source(image: object, where: str, kind: str = "image/png") -> str:
    """Returns the source of an OpenAI image, video or audio part."""
    if isinstance(image, Mapping):
        image = image.get("url")
    if not isinstance(image, str):
        raise InvalidRequest(
            f"{where}: got {shown(image)}, expected an object with a url",
            hint=f"write it as {{'url': 'data:{kind};base64,...'}}",
            param=where,
        )
    return image


def block_source(block: object, where: str) -> str:
    """Returns the source of an Anthropic image block."""
    source = block if isinstance(block, Mapping) else {}
    kind = source.get("type")
    if kind == "base64" and isinstance(source.get("data"), str):
        return base64_source(source["data"], str(source.get("media_type") or "image/png"))
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    raise InvalidRequest(
        f"{where}: got {shown(block)}, expected {{'type': 'base64', 'media_type', 'data'}} or"
        " {'type': 'url', 'url'}",
        param=where,
    )
