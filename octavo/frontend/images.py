"""Images in prompts and conversations: extracts and reads them, and inserts their tokens.

`prompt_ports.ImageReader` decodes the image formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from octavo.api.errors import InvalidRequest, shown
from octavo.engine.protocol.step import MediaItem, MediaPixels
from octavo.frontend.arguments import Messages
from octavo.text.ports import DecodedImage, ImageReader

KEY = "multi_modal_data"
"""Key of a prompt's dict under which its images are given, as {"image": ...}."""


class PromptWithImages(NamedTuple):
    """A prompt's tokens, including one for each row of an encoded image, and the positions of the
    images.
    """

    token_ids: list[int]
    media: list[MediaItem]
    pixels: list[MediaPixels]


def get_images(prompt: object) -> list[Any]:
    if not isinstance(prompt, Mapping) or prompt.get(KEY) is None:
        return []
    media = prompt[KEY]
    if not isinstance(media, Mapping) or not media.keys() <= {"image"}:
        raise InvalidRequest(
            f"{KEY}: got {shown(media)}, expected {{'image': IMAGE}} with an image or a list of"
            " images",
            param=KEY,
        )
    images = media.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def extract_images(messages: Messages) -> tuple[Messages, list[Any]]:
    """Returns the messages with images replaced by {"type": "image"}, as chat templates expect, and
    the list of images.
    """
    images: list[Any] = []
    plain: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [
                _part(part, images, f"messages[{index}].content[{at}]")
                for at, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        plain.append(message)
    return (plain, images) if images else (messages, images)


def _part(part: Any, images: list[Any], where: str) -> Any:
    """Returns a content part for the template; appends its image, if any, to `images`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return part
    source = part.get("image_url", part.get("image", part.get("url", part.get("path"))))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise InvalidRequest(
            f"{where}: got an image part without an image, expected a data URL",
            hint="write it as {'type': 'image_url', 'image_url': {'url':"
            " 'data:image/png;base64,...'}}",
            param=where,
        )
    images.append(source)
    return {"type": "image"}


class ImageInputs:
    """Reads the images of prompts if the model accepts images."""

    def __init__(self, reader: ImageReader | None) -> None:
        self._reader = reader

    @property
    def is_read(self) -> bool:
        """Whether the model accepts images."""
        return self._reader is not None

    @property
    def replacements(self) -> Mapping[str, str]:
        """Texts to replace in prompts with images, and their replacements."""
        return {} if self._reader is None else self._reader.replacements

    def replaced(self, text: str) -> str:
        """Returns the text of a prompt with images in the form that the model expects."""
        for old, new in self.replacements.items():
            text = text.replace(old, new)
        return text

    def read(self, sources: Sequence[Any]) -> list[DecodedImage]:
        """Reads images; raises InvalidRequest if the model does not accept any."""
        if self._reader is None:
            raise InvalidRequest(
                "image: got an image, but the model accepts text only",
                hint="use a vision model, such as Qwen2.5-VL or Gemma 3, on one device",
                param="image",
            )
        return self._reader.read(sources)

    def placed(self, token_ids: Sequence[int], sources: Sequence[Any]) -> PromptWithImages:
        """Replaces each image placeholder token by the tokens of one image."""
        images = self.read(sources)
        assert self._reader is not None, "images are refused without a reader"
        token_id = self._reader.token_id
        count = sum(token == token_id for token in token_ids)
        if count != len(images):
            words = " or ".join(map(repr, self.replacements)) or f"the token {token_id}"
            raise InvalidRequest(
                f"prompt: has placeholders for {count} images, got {len(images)}",
                hint=f"insert {words} once per image, or send messages with image_url parts",
                param="prompt",
            )
        new_ids: list[int] = []
        media: list[MediaItem] = []
        left = iter(images)
        for token in token_ids:
            if token != token_id:
                new_ids.append(token)
                continue
            image, first = next(left), len(new_ids)
            media += [replace(item, start=item.start + first) for item in image.media]
            new_ids += image.token_ids
        pixels = {view.digest: view for image in images for view in image.pixels}
        return PromptWithImages(new_ids, media, list(pixels.values()))
