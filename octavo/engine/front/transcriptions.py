"""Speech turned into text: windows of a sound as requests, and their answers as one text.

Owns what the tokens of a model that hears mean. The sound itself is read by a `Hearing`; every
window is a request of its own, so that the windows of a file are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

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

TIMESTAMPS = "octavo-timestamps"
"""Name of the logits processor that draws timestamps."""
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
    num_timestamps: int = 0
    """Number of tokens behind `no_timestamps` that stand for times; 0: the model has none."""
    max_tokens: int = 224
    """Most tokens of a window's text."""

    @property
    def prompt_tokens(self) -> int:
        """Length of a prompt that asks for timestamps."""
        return 3 if self.languages else 1

    def is_timestamp(self, token: int) -> bool:
        return self.no_timestamps is not None and token > self.no_timestamps


@dataclass(frozen=True, slots=True)
class SoundWindow:
    """A part of a sound, as its encoder takes it."""

    encoder_input: Callable[[], EncoderInput]
    """Makes the encoder's input, which is large."""
    start_s: float
    end_s: float


class Hearing(Protocol):
    """Reads sounds for one model."""

    @property
    def window_s(self) -> float:
        """Length of a whole window, in seconds."""
        ...

    def windows(self, data: bytes) -> list[SoundWindow]:
        """Returns a file's sound in windows; InvalidRequest where it is none."""
        ...


class HeardText(NamedTuple):
    """A part of a sound with its text, before it has a number."""

    start_s: float
    end_s: float
    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Wishes for a sound's text."""

    language: str | None = None
    """Code of the language, such as "en"; None: the model finds it."""
    task: SpeechTask = "transcribe"
    temperature: float = 0.0
    seed: int | None = None
    timestamps: bool = False
    """Whether segments begin and end where the model hears them; else each is a window."""


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
        if options.timestamps and not self.tokens.num_timestamps:
            raise InvalidRequest(
                "timestamps: got true, but this engine's model draws none",
                hint="leave it out, or take the native backend and a model with timestamps",
                param="timestamps",
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
        if tokens.no_timestamps is not None and not options.timestamps:
            prompt.append(tokens.no_timestamps)
        params = SamplingParams(
            temperature=options.temperature,
            seed=options.seed,
            max_tokens=tokens.max_tokens,
            min_tokens=1,
            logit_bias=dict.fromkeys(tokens.banned_at_start, -100.0) or None,
            logits_processors=[TIMESTAMPS] if options.timestamps else None,
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
        pairs = zip(windows, outputs, strict=True)
        spans = [span for pair in pairs for span in self._spans(*pair, options)]
        segments = [Segment(index, *span) for index, span in enumerate(spans)]
        return Transcription(
            text=" ".join(segment.text for segment in segments if segment.text),
            segments=segments,
            language=options.language or "en",
            duration_s=windows[-1].end_s,
            task=options.task,
            error=failed,
        )

    def _spans(
        self, window: SoundWindow, output: RequestOutput, options: SpeechOptions
    ) -> list[HeardText]:
        """Returns the segments of a window."""
        answer = output.outputs[0]
        if not options.timestamps or output.error is not None:
            text = answer.text.strip()
            return [HeardText(window.start_s, window.end_s, text, list(answer.token_ids))]
        step_s = self.hearing.window_s / (self.tokens.num_timestamps - 1)
        assert self.tokens.no_timestamps is not None, "it has timestamps"
        first, end_s = self.tokens.no_timestamps + 1, window.end_s
        found: list[HeardText] = []
        start_s, words = window.start_s, list[int]()
        for token in answer.token_ids:
            if not self.tokens.is_timestamp(token):
                words.append(token)
                continue
            time_s = min(window.start_s + (token - first) * step_s, end_s)
            if words:
                found.append(self._span(start_s, time_s, words))
            start_s, words = time_s, []
        return [*found, self._span(start_s, end_s, words)] if words else found

    def _span(self, start_s: float, end_s: float, words: list[int]) -> HeardText:
        tokenizer = self.inputs.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(words).strip()
        return HeardText(round(start_s, 3), round(end_s, 3), text, words)
