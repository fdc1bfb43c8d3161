"""Speech turned into text: windows of a sound as requests.

Owns what the tokens of a model that hears mean. The sound itself is read by a `Hearing`; every
window is a request of its own. Which windows a sound has, and what becomes of their answers, is a
`Listening`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

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

SpeechTask = Literal["transcribe", "translate"]

TIMESTAMPS = "octavo-timestamps"
"""Name of the logits processor that draws timestamps."""


Sound = bytes | str | Path
"""The bytes of a sound file, or its path."""


def sound_bytes(sound: Sound) -> bytes:
    """Returns a file's bytes; InvalidRequest where a path cannot be read."""
    if isinstance(sound, bytes):
        return sound
    if not isinstance(sound, str | Path):
        raise InvalidRequest(
            f"sounds: got {shown(sound)}, allowed are the bytes or the path of a sound file"
        )
    try:
        return Path(sound).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"sounds: {sound} cannot be read: {error.strerror or error}",
            hint="give the path of a WAV, FLAC, OGG or MP3 file, or its bytes",
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
    """Most tokens of a window's text; a decoder's context is twice as long."""
    previous: int | None = None
    """Token before a text that goes before a sound's; None where the model has none."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""

    @property
    def prompt_tokens(self) -> int:
        """Length of a prompt that asks for timestamps."""
        return 3 if self.languages else 1

    @property
    def first_timestamp(self) -> int:
        """Token that stands for the beginning of a window."""
        assert self.no_timestamps is not None, "it has timestamps"
        return self.no_timestamps + 1


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

    def sound(self, data: bytes) -> HeardSound:
        """Returns a file's sound; InvalidRequest where it is none."""
        ...


class HeardSound(Protocol):
    """A sound that has been read."""

    @property
    def duration_s(self) -> float: ...

    def window(self, start_s: float) -> SoundWindow:
        """Returns the window that begins there, as long as a window is or the sound goes on."""
        ...


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Wishes for a sound's text."""

    language: str | None = None
    """Code of the language, such as "en"; None: the model finds it."""
    task: SpeechTask = "transcribe"
    temperature: float = 0.0
    seed: int | None = None
    timestamps: bool | None = False
    """Whether segments begin and end where the model hears them; else each is a window. None: they
    do where the model draws times.
    """
    prompt: str | None = None
    """Text that goes before the first window's, whose spelling and style the model goes on with."""


@dataclass(frozen=True, slots=True)
class Transcriptions:
    """Makes the requests of sounds, and texts of their answers."""

    hearing: Hearing
    tokens: SpeechTokens
    inputs: InputProcessor

    def checked(self, options: SpeechOptions) -> SpeechOptions:
        """Returns the options with none left open but the language; InvalidRequest where the model
        cannot do what is asked.
        """
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
        if options.prompt and (self.tokens.previous is None or self.inputs.tokenizer is None):
            raise InvalidRequest(
                "prompt: the model has no token for a text that goes before",
                hint="leave it out",
                param="prompt",
            )
        times = options.timestamps
        return replace(
            options, timestamps=bool(self.tokens.num_timestamps) if times is None else times
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
        prompt = [*self._before(window, options), tokens.start]
        if tokens.languages:
            prompt.append(tokens.languages[options.language or "en"])
            prompt.append(tokens.tasks[options.task])
        if tokens.no_timestamps is not None and not options.timestamps:
            prompt.append(tokens.no_timestamps)
        params = SamplingParams(
            temperature=options.temperature,
            seed=options.seed,
            max_tokens=min(tokens.max_tokens, 2 * tokens.max_tokens - len(prompt)),
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

    def _before(self, window: SoundWindow, options: SpeechOptions) -> list[int]:
        """Returns the tokens of the text before a sound's first window, the last ones of a long
        text.
        """
        tokenizer, previous = self.inputs.tokenizer, self.tokens.previous
        if window.start_s or not options.prompt or tokenizer is None or previous is None:
            return []
        ids = tokenizer.encode(f" {options.prompt.strip()}", add_special_tokens=False)
        return [previous, *ids[1 - self.tokens.max_tokens :]]

    def text_of(self, token_ids: list[int]) -> str:
        """Returns the text of tokens; "" without a tokenizer."""
        tokenizer = self.inputs.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids).strip()
