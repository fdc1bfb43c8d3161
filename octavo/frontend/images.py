"""Images in prompts and conversations: extracts and reads them, and inserts their tokens.

`prompt_ports.ImageReader` decodes the image formats.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec.structs import replace

from octavo.api.errors import InvalidRequest, shown
from octavo.engine.protocol.step import MediaItem, MediaPixels
from octavo.frontend.arguments import Messages
from octavo.text.ports import DecodedImage, ImageReader, PrefixPrompt, VideoSource

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
    if not isinstance(media, Mapping) or not media.keys() <= {"image", "video"}:
        raise InvalidRequest(
            f"{KEY}: got {shown(media)}, expected {{'image': IMAGE}} with an image or a list of"
            " images, or {'video': [VIDEO]}",
            param=KEY,
        )
    images, videos = media.get("image"), media.get("video")
    images = list(images) if isinstance(images, list | tuple) else [images]
    videos = videos if isinstance(videos, list) else [videos]
    return [
        *(image for image in images if image is not None),
        *map(_video, (video for video in videos if video is not None)),
    ]


def _video(source: Any) -> Any:
    """Returns a video with its rate, if it is given as (frames, {"fps": RATE}) as in vLLM."""
    if isinstance(source, DecodedImage | VideoSource):
        return source
    fps = None
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        source, fps = source[0], source[1].get("fps")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or fps <= 0):
        raise InvalidRequest(f"fps: got {fps!r}, expected a number above 0", param="fps")
    return VideoSource(source, fps)


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


def _entire_prompt(
    token_ids: Sequence[int], media: Sequence[MediaItem], prefix: PrefixPrompt
) -> MediaItem:
    """Returns the range of a prompt whose tokens attend to one another; its digest is that of the
    entire prompt, which the KV of each token depends on.
    """
    if len(token_ids) > prefix.max_tokens:
        raise InvalidRequest(
            f"prompt: got {len(token_ids):,} tokens with images, expected at most"
            f" {prefix.max_tokens:,}: one step computes them",
            hint="shorten the prompt, or start the engine with a larger --max-num-batched-tokens",
            param="prompt",
        )
    digest = blake2b(array("i", token_ids).tobytes(), digest_size=16, person=b"octavo prefix")
    for item in media:
        digest.update(item.digest)
    return MediaItem(digest.digest(), 0, len(token_ids), (0, 0), is_whole=True)


def _part(part: Any, images: list[Any], where: str) -> Any:
    """Returns a content part for the template; appends its image, if any, to `images`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("video", "video_url"):
        images.append(_video(_source(part, "video", where)))
        return {"type": "video"}
    if kind not in ("image", "image_url"):
        return part
    images.append(_source(part, "image", where))
    return {"type": "image"}


def _source(part: Mapping[str, Any], noun: str, where: str) -> Any:
    source = part.get(f"{noun}_url", part.get(noun, part.get("url", part.get("path"))))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        kind = {"image": "image/png", "video": "video/mp4"}[noun]
        article = {"image": "an image", "video": "a video"}[noun]
        raise InvalidRequest(
            f"{where}: got {article} part without {article}, expected a data URL",
            hint=f"write it as {{'type': '{noun}_url', '{noun}_url': {{'url':"
            f" 'data:{kind};base64,...'}}}}",
            param=where,
        )
    return source


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
        prefix = None if self._reader is None else self._reader.prefix
        if prefix is None or prefix.begin in text:
            return text
        ends = (text.rfind(word) + len(word) for word in self.replacements if word in text)
        last = max(ends, default=0)
        return f"{text[:last]}{prefix.begin}{text[last:]}{prefix.end}"

    def read(self, sources: Sequence[Any]) -> list[DecodedImage]:
        """Reads images; raises InvalidRequest if the model does not accept any."""
        if self._reader is None:
            is_video = isinstance(sources[0], VideoSource)
            noun, what = ("video", "a video") if is_video else ("image", "an image")
            raise InvalidRequest(
                f"{noun}: got {what}, but the model accepts text only",
                hint="use a vision model, such as Qwen2.5-VL or Gemma 3, on one device",
                param=noun,
            )
        return self._reader.read(sources)

    def placed(self, token_ids: Sequence[int], sources: Sequence[Any]) -> PromptWithImages:
        """Replaces each placeholder token by the tokens of one image or video."""
        decoded = self.read(sources)
        assert self._reader is not None, "images are refused without a reader"
        images = [one for one in decoded if not one.is_video]
        videos = [one for one in decoded if one.is_video]
        token_id, video_token_id = self._reader.token_id, self._reader.video_token_id
        prefix = self._reader.prefix
        if prefix is not None and list(token_ids[1:2]) == [token_id]:
            token_ids = token_ids[token_ids[0] != token_id :]  # the tokenizer's own first token
        self._check_places(token_ids, token_id, len(images), "image")
        left = {token_id: iter(images)}
        if video_token_id is not None:
            self._check_places(token_ids, video_token_id, len(videos), "video")
            left[video_token_id] = iter(videos)
        new_ids: list[int] = []
        media: list[MediaItem] = []
        for token in token_ids:
            if token not in left:
                new_ids.append(token)
                continue
            one, first = next(left[token]), len(new_ids)
            media += [replace(item, start=item.start + first) for item in one.media]
            new_ids += one.token_ids
        if prefix is not None:
            media.append(_entire_prompt(new_ids, media, prefix))
        pixels = {view.digest: view for one in decoded for view in one.pixels}
        return PromptWithImages(new_ids, media, list(pixels.values()))

    def _check_places(
        self, token_ids: Sequence[int], token_id: int, num_given: int, noun: str
    ) -> None:
        count = sum(token == token_id for token in token_ids)
        if count != num_given:
            words = " or ".join(map(repr, self.replacements)) or f"the token {token_id}"
            raise InvalidRequest(
                f"prompt: has placeholders for {count} {noun}s, got {num_given}",
                hint=f"insert {words} once per {noun}, or send messages with {noun}_url parts",
                param="prompt",
            )
