"""Reads the media of a prompt: images and videos by one reader, audio by another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.media.reader import PillowReader
from octavo.media.sound import PromptAudioReader
from octavo.text.ports import AudioSource, DecodedMedia, MediaKind, PrefixPrompt


@dataclass(frozen=True, slots=True)
class PromptMediaReader:
    """Implements `MediaReader`."""

    images: PillowReader | None
    """None: the model reads no images."""
    audio: PromptAudioReader | None
    """None: the model reads no audio."""

    @property
    def token_ids(self) -> Mapping[MediaKind, int]:
        """Placeholder tokens of the kinds of media that the model reads."""
        seen = {} if self.images is None else self.images.token_ids
        return seen if self.audio is None else {**seen, "audio": self.audio.token_id}

    @property
    def replacements(self) -> Mapping[str, str]:
        """Placeholder texts in a prompt and their replacements."""
        seen = {} if self.images is None else self.images.replacements
        return seen if self.audio is None else {**seen, **self.audio.replacements}

    @property
    def prefix(self) -> PrefixPrompt | None:
        """Form of prompts with images; None: their text tokens are causal."""
        return None if self.images is None else self.images.prefix

    def read(self, sources: Sequence[Any]) -> list[DecodedMedia]:
        """Reads media in order; raises InvalidRequest for an invalid one, or one of a kind that the
        model does not read.
        """
        heard = [source for source in sources if _is_audio(source)]
        seen = [source for source in sources if not _is_audio(source)]
        if heard and self.audio is None:
            raise InvalidRequest(
                "audio: got audio, but the model reads images only",
                hint="use a model that reads audio, such as Qwen2-Audio or Voxtral",
                param="audio",
            )
        if seen and self.images is None:
            raise InvalidRequest(
                "image: got an image or video, but the model reads audio only",
                hint="use a vision model, such as Qwen2.5-VL or Gemma 3",
                param="image",
            )
        images = iter([] if self.images is None or not seen else self.images.read(seen))
        audio = iter([] if self.audio is None or not heard else self.audio.read(heard))
        return [next(audio if _is_audio(source) else images) for source in sources]


def _is_audio(source: object) -> bool:
    if isinstance(source, DecodedMedia):
        return source.kind == "audio"
    return isinstance(source, AudioSource)
