"""Speech to text: one request for each window of an audio file, joined to one transcript.

An `AudioDecoder` decodes the audio. Without timestamps, the windows are adjacent and may be
computed together. With timestamps, a window begins at the end of the last complete segment, so that
no word is cut. With voice activity detection, silence is skipped and windows end in pauses. Source:
Radford et al. 2022, section 3.8, and `transcribe` of OpenAI's whisper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from octavo.api.errors import InvalidRequest, did_you_mean, shown
from octavo.api.outputs import RequestOutput
from octavo.api.sampling_params import SamplingParams
from octavo.api.transcription import Segment, Transcription, VoiceActivity, Word
from octavo.engine.protocol.step import EncoderInput
from octavo.frontend.input_processor import (
    DEFAULT_CONTEXT,
    InputProcessor,
    ParentRequest,
    RequestContext,
    TokenizedInput,
)
from octavo.frontend.words import split_words

SpeechTask = Literal["transcribe", "translate"]

TIMESTAMPS = "octavo-timestamps"
"""Name of the logits processor that enforces the timestamp rules."""


Sound = bytes | str | Path
"""Bytes of an audio file, or its path."""


def read_audio_bytes(sound: Sound) -> bytes:
    """Returns a file's bytes; raises InvalidRequest if a path cannot be read."""
    if isinstance(sound, bytes):
        return sound
    if not isinstance(sound, str | Path):
        raise InvalidRequest(
            f"sounds: got {shown(sound)}, expected the bytes or the path of an audio file"
        )
    try:
        return Path(sound).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"sounds: {sound} cannot be read: {error.strerror or error}",
            hint="pass the path or the bytes of a WAV, FLAC, OGG or MP3 file",
        ) from None


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Special tokens that specify the language and the task for a speech decoder."""

    start: int
    languages: Mapping[str, int] = field(default_factory=dict)
    """Token of each language code; {} for an English-only model."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    no_timestamps: int | None = None
    """Token that disables timestamps; None if the model has none."""
    banned_at_start: tuple[int, ...] = ()
    """Tokens that a text must not begin with."""
    num_timestamps: int = 0
    """Number of timestamp tokens, which follow `no_timestamps`; 0: the model has none."""
    max_tokens: int = 224
    """Maximum number of tokens of a window's text; a decoder's context is twice as long."""
    previous: int | None = None
    """Token before the preceding text in a prompt; None if the model has none."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""

    @property
    def prompt_tokens(self) -> int:
        """Length of a prompt with timestamps."""
        return 3 if self.languages else 1

    @property
    def first_timestamp(self) -> int:
        """Token of the timestamp 0."""
        assert self.no_timestamps is not None, "it has timestamps"
        return self.no_timestamps + 1


@dataclass(frozen=True, slots=True)
class WindowInput:
    """A window of an audio file, as encoder input."""

    encoder_input: Callable[[], EncoderInput]
    """Builds the encoder's input, which is large."""
    start_s: float
    end_s: float


class AudioDecoder(Protocol):
    """Decodes audio for one model."""

    @property
    def window_s(self) -> float:
        """Length of a full window, in seconds."""
        ...

    def sound(self, data: bytes) -> DecodedAudio:
        """Decodes an audio file; raises InvalidRequest if it is not one."""
        ...


class DecodedAudio(Protocol):
    """Decoded audio."""

    @property
    def duration_s(self) -> float: ...

    def window(self, start_s: float, end_s: float | None = None) -> WindowInput:
        """Returns the window that begins at `start_s`; it ends at `end_s`, or the end of the audio,
        at the latest.
        """
        ...

    def find_speech(self, activity: VoiceActivity) -> list[tuple[float, float]]:
        """Returns the start and end of each part with speech, in seconds; no part is longer than a
        window.
        """
        ...


class WordAligner(Protocol):
    """Aligns a transcript's tokens with the audio."""

    def find_times(
        self,
        encoder_input: EncoderInput,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        duration_s: float,
    ) -> list[float]:
        """Returns the time at which each token begins, and the time at which the last one ends, in
        seconds from the window's start. `duration_s`: length of the audio in the window.
        """
        ...


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """Options of a transcription."""

    language: str | None = None
    """Language code such as "en"; None: detect the language."""
    task: SpeechTask = "transcribe"
    temperature: float = 0.0
    seed: int | None = None
    timestamps: bool | None = False
    """Whether segments begin and end at timestamps that the model predicts; otherwise each segment
    is a window. None: whether the model supports timestamps.
    """
    words: bool = False
    """Whether to find the time of each word."""
    chunking: VoiceActivity | None = None
    """Detect speech and transcribe only its parts; None: transcribe the complete audio."""
    prompt: str | None = None
    """Text that precedes the first window; the model continues its spelling and style."""


@dataclass(frozen=True, slots=True)
class Transcriptions:
    """Builds the requests for audio files, and transcripts from their outputs."""

    decoder: AudioDecoder
    tokens: SpeechTokens
    inputs: InputProcessor
    aligner: WordAligner | None = None
    """Finds the times of words; None: not supported."""

    def checked(self, options: SpeechOptions) -> SpeechOptions:
        """Returns the options with defaults for all but the language; raises InvalidRequest if the
        model does not support them.
        """
        languages, language = self.tokens.languages, options.language
        known = sorted(languages) or ["en"]
        if language is not None and language not in known:
            raise InvalidRequest(
                f"language: got {shown(language)}, expected {', '.join(known)}",
                hint=did_you_mean(str(language), known),
                param="language",
            )
        if options.task not in ("transcribe", "translate"):
            raise InvalidRequest(
                f"task: got {shown(options.task)}, expected transcribe or translate",
                param="task",
            )
        if options.task == "translate" and "translate" not in self.tokens.tasks:
            raise InvalidRequest(
                "task: got 'translate', but the model supports English only",
                hint="use a multilingual model",
                param="task",
            )
        if options.timestamps and not self.tokens.num_timestamps:
            raise InvalidRequest(
                "timestamps: got true, but this model or backend does not support timestamps",
                hint="remove it, or use the native backend and a model with timestamps",
                param="timestamps",
            )
        if options.prompt and (self.tokens.previous is None or self.inputs.tokenizer is None):
            raise InvalidRequest(
                "prompt: the model does not support a prompt before the transcript",
                hint="remove it",
                param="prompt",
            )
        if options.words and (self.aligner is None or self.inputs.tokenizer is None):
            raise InvalidRequest(
                "words: got true, but this model or backend does not support word timestamps",
                hint="remove it, or use the native backend and a Whisper model",
                param="words",
            )
        if options.chunking is not None:
            options.chunking.check()
        times = options.timestamps
        return replace(
            options, timestamps=bool(self.tokens.num_timestamps) if times is None else times
        )

    def needs_language(self, options: SpeechOptions) -> bool:
        """Returns whether the language must be detected first."""
        return options.language is None and bool(self.tokens.languages)

    def language_request(
        self, request_id: str, window: WindowInput, origin: RequestContext = DEFAULT_CONTEXT
    ) -> ParentRequest:
        """Returns the request that detects a window's language by generating one token."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            allowed_token_ids=sorted(self.tokens.languages.values()),
        )
        return self._make_request(request_id, window, [self.tokens.start], params, origin)

    def get_language(self, output: RequestOutput) -> str:
        """Returns the language code from the output of a language request."""
        token_ids = output.outputs[0].token_ids
        codes = (code for code, token in self.tokens.languages.items() if token_ids == [token])
        return next(codes, "en")

    def request(
        self,
        request_id: str,
        window: WindowInput,
        options: SpeechOptions,
        origin: RequestContext = DEFAULT_CONTEXT,
    ) -> ParentRequest:
        tokens = self.tokens
        prompt = [*self._before(window, options), *self._prompt(options)]
        params = SamplingParams(
            temperature=options.temperature,
            seed=options.seed,
            max_tokens=min(tokens.max_tokens, 2 * tokens.max_tokens - len(prompt)),
            min_tokens=1,
            logit_bias=dict.fromkeys(tokens.banned_at_start, -100.0) or None,
            logits_processors=[TIMESTAMPS] if options.timestamps else None,
        )
        return self._make_request(request_id, window, prompt, params, origin)

    def _prompt(self, options: SpeechOptions) -> list[int]:
        """Returns the tokens that specify language, task and timestamps."""
        tokens, prompt = self.tokens, [self.tokens.start]
        if tokens.languages:
            prompt.append(tokens.languages[options.language or "en"])
            prompt.append(tokens.tasks[options.task])
        if tokens.no_timestamps is not None and not options.timestamps:
            prompt.append(tokens.no_timestamps)
        return prompt

    def find_words(
        self, window: WindowInput, spans: Sequence[list[int]], options: SpeechOptions
    ) -> list[Word]:
        """Returns the words of a window's segments, given as text tokens."""
        tokenizer, token_ids = self.inputs.tokenizer, [token for span in spans for token in span]
        if self.aligner is None or tokenizer is None or not token_ids:
            return []
        prompt = self._prompt(replace(options, timestamps=False))
        duration_s = window.end_s - window.start_s
        times = self.aligner.find_times(window.encoder_input(), prompt, token_ids, duration_s)
        words: list[Word] = []
        first = 0
        for span in spans:
            for text, start, end in split_words(span, tokenizer.decode, options.language or "en"):
                start_s, end_s = (window.start_s + times[first + at] for at in (start, end))
                words.append(Word(text.strip(), round(start_s, 3), round(end_s, 3)))
            first += len(span)
        return words

    def _make_request(
        self,
        request_id: str,
        window: WindowInput,
        prompt: list[int],
        params: SamplingParams,
        origin: RequestContext,
    ) -> ParentRequest:
        read = TokenizedInput(None, [], prompt, encoder_input=window.encoder_input())
        return self.inputs.process_inputs(request_id, read, params, origin)

    def _before(self, window: WindowInput, options: SpeechOptions) -> list[int]:
        """Returns the tokens of the preceding text for the first window; the last ones if it is too
        long.
        """
        tokenizer, previous = self.inputs.tokenizer, self.tokens.previous
        if window.start_s or not options.prompt or tokenizer is None or previous is None:
            return []
        ids = tokenizer.encode(f" {options.prompt.strip()}", add_special_tokens=False)
        return [previous, *ids[1 - self.tokens.max_tokens :]]

    def text_of(self, token_ids: list[int]) -> str:
        """Detokenizes tokens; "" without a tokenizer."""
        tokenizer = self.inputs.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids).strip()


MOST_WINDOWS = 16
"""Maximum number of windows that are computed together, since all their inputs are in memory."""
LEAST_S = 0.01
"""Minimum length of the last window, in seconds: one frame."""
WINDOWS_A_LENGTH, SPARE_WINDOWS = 4, 16
"""Maximum number of windows, as a multiple of the number that fit the audio end to end, plus a
constant. Beyond it, windows follow each other without overlap, so that the transcription ends even
if its segments barely advance.
"""


class SegmentedOutput(NamedTuple):
    """Output of a window, split at its timestamps. Times are in steps from the window's start."""

    spans: list[tuple[int, int, list[int]]]
    """First and last step of each segment, and its text tokens."""
    num_steps: int
    """Number of steps from this window's start to the next window's."""


def split_at_timestamps(token_ids: Sequence[int], first: int, num_steps: int) -> SegmentedOutput:
    """Splits a window's tokens at its timestamps; `first` is the token of step 0, and the window
    has `num_steps` steps.

    Segments end where two timestamps are adjacent. The part after the last such pair is transcribed
    again in the next window, which begins there, unless the output ends with a single timestamp:
    then there is no more speech after it.
    """
    is_time = [token >= first for token in token_ids]
    cuts = [i for i in range(1, len(token_ids)) if is_time[i - 1] and is_time[i]]
    ends_alone = is_time[-2:] == [False, True]
    if not cuts:
        times = [token - first for token in token_ids if token >= first]
        last = times[-1] if times and times[-1] else num_steps
        return SegmentedOutput([(0, last, [t for t in token_ids if t < first])], num_steps)
    if ends_alone:
        cuts.append(len(token_ids))
    spans = [
        (piece[0] - first, piece[-1] - first, [token for token in piece if token < first])
        for start, end in zip([0, *cuts], cuts, strict=False)
        for piece in [token_ids[start:end]]
    ]
    return SegmentedOutput(spans, num_steps if ends_alone else token_ids[cuts[-1] - 1] - first)


@dataclass(slots=True)
class TranscriptionJob:
    """An audio file that is being transcribed."""

    speech: Transcriptions
    sound: DecodedAudio
    options: SpeechOptions
    _segments: list[Segment] = field(default_factory=list)
    _parts: list[tuple[float, float]] = field(init=False)
    """Start and end of the parts to transcribe, in seconds."""
    _place: tuple[int, int] = (0, 0)
    """Part of the next window, and the step at which it begins within the part."""
    _words: list[Word] = field(default_factory=list)
    _num_windows: int = 0
    _error: str | None = None

    def __post_init__(self) -> None:
        activity, whole = self.options.chunking, (0.0, self.sound.duration_s)
        self._parts = [whole] if activity is None else self.sound.find_speech(activity)

    @property
    def _steps_per_window(self) -> int:
        return self.speech.tokens.num_timestamps - 1 if self.options.timestamps else 1

    @property
    def _step_s(self) -> float:
        return self.speech.decoder.window_s / self._steps_per_window

    def windows(self, max_windows: int) -> list[WindowInput]:
        """Returns up to `max_windows` windows that can be computed now; [] at the end."""
        if self._error is not None:
            return []
        windows: list[WindowInput] = []
        part, step = self._place
        while part < len(self._parts) and len(windows) < max_windows:
            start_s, end_s = self._parts[part]
            windows.append(self.sound.window(start_s + step * self._step_s, end_s))
            if self.options.timestamps:
                break
            part, step = self._after(part, step + self._steps_per_window)
        return windows

    def _after(self, part: int, step: int) -> tuple[int, int]:
        """Returns a place in the audio, or the beginning of the next part if this one has ended."""
        start_s, end_s = self._parts[part]
        has_ended = end_s - start_s - step * self._step_s < LEAST_S
        return (part + 1, 0) if has_ended else (part, step)

    def add_output(self, window: WindowInput, output: RequestOutput) -> None:
        """Adds the output of the next window."""
        self._num_windows += 1
        answer = output.outputs[0]
        if output.error is not None:
            self._error = output.error
            return
        if not self.options.timestamps:
            self._move(1)
            self._add(window, (window.start_s, window.end_s), list(answer.token_ids), answer.text)
            self._add_words(window, [list(answer.token_ids)])
            return
        tokens = self.speech.tokens
        token_ids = [token for token in answer.token_ids if token not in tokens.ends]
        kept: list[list[int]] = []
        cut = split_at_timestamps(token_ids, tokens.first_timestamp, self._steps_per_window)
        for first, last, words in cut.spans:
            start_s = min(window.start_s + first * self._step_s, window.end_s)
            end_s = min(window.start_s + last * self._step_s, window.end_s)
            if words and start_s < end_s:
                self._add(window, (start_s, end_s), words, self.speech.text_of(words))
                kept.append(words)
        self._add_words(window, kept)
        self._move(cut.num_steps if self._may_overlap(cut) else self._steps_per_window)

    def _add_words(self, window: WindowInput, spans: list[list[int]]) -> None:
        if self.options.words:
            special = {*self.speech.tokens.ends, self.speech.tokens.no_timestamps}
            texts = [[token for token in span if token not in special] for span in spans]
            self._words += self.speech.find_words(window, texts, self.options)

    def _move(self, num_steps: int) -> None:
        part, step = self._place
        self._place = self._after(part, step + num_steps)

    def _may_overlap(self, cut: SegmentedOutput) -> bool:
        """Whether the next window may begin before the end of this one."""
        lengths = math.ceil(self.sound.duration_s / self.speech.decoder.window_s)
        return cut.num_steps > 0 and self._num_windows < WINDOWS_A_LENGTH * lengths + SPARE_WINDOWS

    def _add(
        self, window: WindowInput, span_s: tuple[float, float], words: list[int], text: str
    ) -> None:
        start_s, end_s = (round(time_s, 3) for time_s in span_s)
        index, seek_s = len(self._segments), round(window.start_s, 3)
        self._segments.append(Segment(index, start_s, end_s, text.strip(), words, seek_s))

    def result(self) -> Transcription:
        """Returns the transcript, with an error if one of its windows failed."""
        return Transcription(
            text=" ".join(segment.text for segment in self._segments if segment.text),
            segments=self._segments,
            language=self.options.language or "en",
            duration_s=self.sound.duration_s,
            task=self.options.task,
            words=self._words,
            error=self._error,
        )


def next_windows(
    jobs: Sequence[TranscriptionJob],
) -> list[tuple[TranscriptionJob, WindowInput]]:
    """Returns the next windows of several audio files; [] if all are transcribed."""
    windows: list[tuple[TranscriptionJob, WindowInput]] = []
    for job in jobs:
        windows += ((job, window) for window in job.windows(MOST_WINDOWS - len(windows)))
        if len(windows) >= MOST_WINDOWS:
            break
    return windows
