"""Speech turned into text: windows of a sound as requests, and their answers as one text.

Owns what the tokens of a model that hears mean. The sound itself is read by a `Hearing`; every
window is a request of its own, so that the windows of a file are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from octavo.engine.front.input_processor import (
    DEFAULT_ORIGIN,
    FrontRequest,
    InputProcessor,
    Origin,
    ReadInput,
)
from octavo.errors import InvalidRequest, did_you_mean, shown
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.step import EncoderInput
from octavo.transcription import Segment, Transcription

SpeechTask = Literal["transcribe", "translate"]

MOST_WINDOWS = 16
"""Windows that are computed together: their inputs are in memory at once."""


Sound = bytes | str | Path
"""The bytes of a WAV file, or its path."""


def sound_bytes(sound: Sound) -> bytes:
    """Returns a file's bytes; InvalidRequest where a path cannot be read."""
    if isinstance(sound, bytes):
        return sound
    if not isinstance(sound, str | Path):
        raise InvalidRequest(
            f"sounds: got {shown(sound)}, allowed are the bytes or the path of a WAV file"
        )
    try:
        return Path(sound).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"sounds: {sound} cannot be read: {error.strerror or error}",
            hint="give the path of a WAV file, or its bytes",
        ) from None


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The tokens with which a decoder of speech is told what to do."""

    start: int
    languages: Mapping[str, int] = field(default_factory=dict)
    """Token of each language's code; {} for a model of English alone."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    no_timestamps: int | None = None
    """Token that asks for text alone; None where the model has none."""
    banned_at_start: tuple[int, ...] = ()
    """Tokens that are no beginning of a text."""
    max_tokens: int = 224
    """Most tokens of a window's text."""


@dataclass(frozen=True, slots=True)
class SoundWindow:
    """A part of a sound, as its encoder takes it."""

    encoder_input: Callable[[], EncoderInput]
    """Makes the encoder's input, which is large."""
    start_s: float
    end_s: float


class Hearing(Protocol):
    """Reads sounds for one model."""

    def windows(self, data: bytes) -> list[SoundWindow]:
        """Returns a file's sound in windows; InvalidRequest where it is none."""
        ...


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Wishes for a sound's text."""

    language: str | None = None
    """Code of the language, such as "en"; None: the model finds it."""
    task: SpeechTask = "transcribe"
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Transcriptions:
    """Makes the requests of sounds, and texts of their answers."""

    hearing: Hearing
    tokens: SpeechTokens
    inputs: InputProcessor

    def windows(self, data: bytes) -> list[SoundWindow]:
        """Returns a file's sound in windows; InvalidRequest where it is none."""
        return self.hearing.windows(data)

    def check(self, options: SpeechOptions) -> None:
        """Raises InvalidRequest where the model cannot do what is asked."""
        languages, language = self.tokens.languages, options.language
        known = sorted(languages) or ["en"]
        if language is not None and language not in known:
            raise InvalidRequest(
                f"language: got {shown(language)}, allowed are {', '.join(known)}",
                hint=did_you_mean(str(language), known),
                param="language",
            )
        if options.task not in ("transcribe", "translate"):
            raise InvalidRequest(
                f"task: got {shown(options.task)}, allowed are transcribe and translate",
                param="task",
            )
        if options.task == "translate" and "translate" not in self.tokens.tasks:
            raise InvalidRequest(
                "task: got 'translate', but the model hears English alone",
                hint="take a multilingual model",
                param="task",
            )

    def asks_language(self, options: SpeechOptions) -> bool:
        """Returns whether the language has to be found first."""
        return options.language is None and bool(self.tokens.languages)

    def language_request(
        self, request_id: str, window: SoundWindow, origin: Origin = DEFAULT_ORIGIN
    ) -> FrontRequest:
        """Returns the request whose one token is the language of a window."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            allowed_token_ids=sorted(self.tokens.languages.values()),
        )
        return self._prepare(request_id, window, [self.tokens.start], params, origin)

    def language_of(self, output: RequestOutput) -> str:
        """Returns the code of the language that such a request has found."""
        drawn = output.outputs[0].token_ids
        found = (code for code, token in self.tokens.languages.items() if drawn == [token])
        return next(found, "en")

    def request(
        self,
        request_id: str,
        window: SoundWindow,
        options: SpeechOptions,
        origin: Origin = DEFAULT_ORIGIN,
    ) -> FrontRequest:
        """Returns the request of a window's text."""
        tokens = self.tokens
        prompt = [tokens.start]
        if tokens.languages:
            prompt.append(tokens.languages[options.language or "en"])
            prompt.append(tokens.tasks[options.task])
        if tokens.no_timestamps is not None:
            prompt.append(tokens.no_timestamps)
        params = SamplingParams(
            temperature=options.temperature,
            seed=options.seed,
            max_tokens=tokens.max_tokens,
            min_tokens=1,
            logit_bias=dict.fromkeys(tokens.banned_at_start, -100.0) or None,
        )
        return self._prepare(request_id, window, prompt, params, origin)

    def _prepare(
        self,
        request_id: str,
        window: SoundWindow,
        prompt: list[int],
        params: SamplingParams,
        origin: Origin,
    ) -> FrontRequest:
        read = ReadInput(None, [], prompt, encoder_input=window.encoder_input())
        return self.inputs.prepare(request_id, read, params, origin)

    def joined(
        self,
        windows: Sequence[SoundWindow],
        outputs: Sequence[RequestOutput],
        options: SpeechOptions,
    ) -> Transcription:
        """Returns the text of a sound, with an error where one of its windows has failed."""
        failed: Any = next((output.error for output in outputs if output.error), None)
        segments = [
            Segment(
                index,
                window.start_s,
                window.end_s,
                output.outputs[0].text.strip(),
                list(output.outputs[0].token_ids),
            )
            for index, (window, output) in enumerate(zip(windows, outputs, strict=True))
        ]
        return Transcription(
            text=" ".join(segment.text for segment in segments if segment.text),
            segments=segments,
            language=options.language or "en",
            duration_s=windows[-1].end_s,
            task=options.task,
            error=failed,
        )
