"""Images, videos and audio in prompts and conversations: extracts and reads them, and inserts their
tokens.

`text.ports.MediaReader` decodes their formats.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec.structs import replace

from octavo.api.errors import InvalidRequest, shown
from octavo.engine.protocol.step import MediaContent, MediaItem
from octavo.frontend.arguments import Messages
from octavo.text.ports import (
    MEDIA_PLURALS,
    MEDIA_TYPES,
    AudioSource,
    DecodedMedia,
    EmbedsReader,
    MediaReader,
    PrefixPrompt,
    VideoSource,
)

KEY = "multi_modal_data"
"""Key of a prompt's dict under which its media are given, as {"image": ...}."""

EMBEDS = "prompt_embeds"
"""Key under which a prompt's embeddings are given."""

AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")

NAMES = {"image": "an image", "video": "a video", "audio": "audio"}
"""Names of the kinds of media, for error messages."""


class PromptWithMedia(NamedTuple):
    """A prompt's tokens, including one for each row of an encoded image, and the positions of the
    images.
    """

    token_ids: list[int]
    media: list[MediaItem]
    pixels: list[MediaContent]


def get_media(prompt: object) -> list[Any]:
    if not isinstance(prompt, Mapping) or prompt.get(KEY) is None:
        return []
    media = prompt[KEY]
    if not isinstance(media, Mapping) or not media.keys() <= {"image", "video", "audio"}:
        raise InvalidRequest(
            f"{KEY}: got {shown(media)}, expected {{'image': IMAGE}} with an image or a list of"
            " images, {'video': [VIDEO]}, or {'audio': [AUDIO]}",
            param=KEY,
        )
    images, videos, audio = (media.get(kind) for kind in ("image", "video", "audio"))
    images = list(images) if isinstance(images, list | tuple) else [images]
    videos, audio = (each if isinstance(each, list) else [each] for each in (videos, audio))
    return [
        *(image for image in images if image is not None),
        *map(_video, (video for video in videos if video is not None)),
        *map(_audio, (each for each in audio if each is not None)),
    ]


def _audio(source: Any) -> Any:
    return source if isinstance(source, DecodedMedia | AudioSource) else AudioSource(source)


def _video(source: Any) -> Any:
    """Returns a video with its rate, if it is given as (frames, {"fps": RATE}) as in vLLM."""
    if isinstance(source, DecodedMedia | VideoSource):
        return source
    fps = None
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        source, fps = source[0], source[1].get("fps")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or fps <= 0):
        raise InvalidRequest(f"fps: got {fps!r}, expected a number above 0", param="fps")
    return VideoSource(source, fps)


def extract_media(messages: Messages) -> tuple[Messages, list[Any]]:
    """Returns the messages with media replaced by {"type": "image"}, "video" or "audio", as chat
    templates expect, and the list of media.
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
    if kind in ("audio", "audio_url"):
        images.append(_audio(_source(part, "audio", where)))
        return {"type": "audio"}
    if kind == "input_audio":
        images.append(_audio(input_audio_url(part.get("input_audio"), f"{where}.input_audio")))
        return {"type": "audio"}
    if kind not in ("image", "image_url"):
        return part
    images.append(_source(part, "image", where))
    return {"type": "image"}


def _source(part: Mapping[str, Any], noun: str, where: str) -> Any:
    source = part.get(f"{noun}_url", part.get(noun, part.get("url", part.get("path"))))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise InvalidRequest(
            f"{where}: got {NAMES[noun]} part without {NAMES[noun]}, expected a data URL",
            hint=f"write it as {{'type': '{noun}_url', '{noun}_url': {{'url':"
            f" 'data:{MEDIA_TYPES[noun]};base64,...'}}}}",
            param=where,
        )
    return source


def input_audio_url(audio: object, where: str) -> str:
    """Returns the data URL of OpenAI's `input_audio`: base64 of a file, and its format."""
    given = audio if isinstance(audio, Mapping) else {}
    data, kind = given.get("data"), given.get("format", "wav")
    if not isinstance(data, str):
        raise InvalidRequest(
            f"{where}: got {shown(audio)}, expected an object with data and format",
            hint="write it as {'data': BASE64, 'format': 'wav'}",
            param=where,
        )
    if kind not in AUDIO_FORMATS:
        raise InvalidRequest(
            f"{where}.format: got {shown(kind)}, expected {', '.join(AUDIO_FORMATS)}",
            param=f"{where}.format",
        )
    return f"data:audio/{kind};base64,{data}"


class MediaInputs:
    """Reads the images, videos and audio of prompts if the model accepts them."""

    def __init__(self, reader: MediaReader | None, embeds: EmbedsReader | None = None) -> None:
        self._reader = reader
        self._embeds = embeds

    def read_embeds(self, source: object) -> DecodedMedia:
        """Reads a prompt's embeddings; raises InvalidRequest if the engine does not accept any."""
        if isinstance(source, DecodedMedia):
            return source
        if self._embeds is None:
            raise InvalidRequest(
                f"{EMBEDS}: got embeddings, but the engine accepts token ids and text only",
                hint="start the engine with --enable-prompt-embeds",
                param=EMBEDS,
            )
        return self._embeds.read(source)

    @property
    def kinds(self) -> Set[str]:
        """Kinds of media that the model accepts: "image", "video", "audio"."""
        return set() if self._reader is None else self._reader.token_ids.keys()

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

    def read(self, sources: Sequence[Any]) -> list[DecodedMedia]:
        """Reads media; raises InvalidRequest if the model does not accept any."""
        if self._reader is None:
            given = {VideoSource: "video", AudioSource: "audio"}
            noun = given.get(type(sources[0]), "image")
            models = "an audio model, such as Qwen2-Audio or Voxtral"
            if noun != "audio":
                models = "a vision model, such as Qwen2.5-VL or Gemma 3"
            raise InvalidRequest(
                f"{noun}: got {NAMES[noun]}, but the model accepts text only",
                hint=f"use {models}, on one device",
                param=noun,
            )
        return self._reader.read(sources)

    def placed(self, token_ids: Sequence[int], sources: Sequence[Any]) -> PromptWithMedia:
        """Replaces each placeholder token by the tokens of one image, video or audio."""
        decoded = self.read(sources)
        assert self._reader is not None, "media are refused without a reader"
        prefix = self._reader.prefix
        if prefix is not None:
            token_id = self._reader.token_ids["image"]
            if list(token_ids[1:2]) == [token_id]:
                token_ids = token_ids[token_ids[0] != token_id :]  # the tokenizer's own first token
        left: dict[int, Iterator[DecodedMedia]] = {}
        for kind, token_id in self._reader.token_ids.items():
            given_media = [one for one in decoded if one.kind == kind]
            self._check_places(token_ids, token_id, len(given_media), kind)
            left[token_id] = iter(given_media)
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
        return PromptWithMedia(new_ids, media, list(pixels.values()))

    def _check_places(
        self, token_ids: Sequence[int], token_id: int, num_given: int, noun: str
    ) -> None:
        count = sum(token == token_id for token in token_ids)
        if count != num_given:
            words = " or ".join(map(repr, self.replacements)) or f"the token {token_id}"
            raise InvalidRequest(
                f"prompt: has placeholders for {count} {MEDIA_PLURALS[noun]}, got {num_given}",
                hint=f"insert {words} once per {noun}, or send messages with {noun}_url parts",
                param="prompt",
            )
