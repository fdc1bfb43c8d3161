"""Builds the audio input of a speech model from the checkpoint's configs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.api.transcription import VoiceActivity
from octavo.audio.audio_reader import AudioReader, AudioWindow
from octavo.audio.log_mel import RATE, LogMel
from octavo.audio.voice_activity import find_speech, get_levels, join_spans
from octavo.engine.protocol.step import EncoderInput
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.transcription import (
    AudioDecoder,
    DecodedAudio,
    Transcriptions,
    WindowInput,
)
from octavo.models.hf_config import HfConfig
from octavo.models.registry import build_alignment
from octavo.program.ops import ScatterRows
from octavo.wiring.model import Model
from octavo.wiring.speech_tokens import speech_tokens
from octavo.wiring.word_aligner import ModelWordAligner


@dataclass(frozen=True, slots=True)
class ModelAudioDecoder(AudioDecoder):
    ear: AudioReader

    @property
    def window_s(self) -> float:
        return self.ear.window_s

    def sound(self, data: bytes) -> DecodedAudio:
        return ModelAudio(self.ear, self.ear.read(data))


@dataclass(frozen=True, slots=True, eq=False)
class ModelAudio(DecodedAudio):
    ear: AudioReader
    samples: NDArray[np.float32]

    @property
    def duration_s(self) -> float:
        return len(self.samples) / RATE

    def window(self, start_s: float, end_s: float | None = None) -> WindowInput:
        heard = self.ear.window(self.samples, start_s, end_s)
        return WindowInput(partial(self._input, heard), heard.start_s, heard.end_s)

    def find_speech(self, activity: VoiceActivity) -> list[tuple[float, float]]:
        spans = find_speech(
            self.samples,
            RATE,
            threshold=activity.threshold,
            padding_s=activity.prefix_padding_ms / 1000,
            silence_s=activity.silence_duration_ms / 1000,
        )
        return join_spans(spans, get_levels(self.samples, RATE), self.ear.window_s)

    def _input(self, window: AudioWindow) -> EncoderInput:
        heard = self.ear.rows(window)
        return EncoderInput(heard.digest, rows=heard.rows, num_rows=heard.num_rows)


def accepts_audio(model: Model) -> bool:
    """Returns whether the model's encoder takes audio."""
    return any(
        isinstance(op, ScatterRows) for program in model.programs()[1:] for op in program.ops
    )


def make_transcriptions(model: Model, inputs: InputProcessor) -> Transcriptions | None:
    """Builds the transcription of a speech model; None for other models."""
    if not accepts_audio(model):
        return None
    config = HfConfig(model.checkpoint.config)
    num_frames = 2 * config.integer("max_source_positions", 1500, low=1)
    ear = AudioReader(LogMel(config.size("num_mel_bins", 80), num_frames))
    tokens = speech_tokens(model.checkpoint.config | model.checkpoint.generation_config)
    if model.config.backend.backend == "torch":
        tokens = replace(tokens, num_timestamps=0)
    return Transcriptions(ModelAudioDecoder(ear), tokens, inputs, _make_aligner(model, ear))


def _make_aligner(model: Model, ear: AudioReader) -> ModelWordAligner | None:
    """Builds the alignment of words; None if the model or its backend has none."""
    if model.config.backend.backend == "torch" or model.config.model.load_format == "dummy":
        return None
    given = model.checkpoint.generation_config.get("alignment_heads") or []
    heads = [(int(layer), int(head)) for layer, head in given]
    programs = build_alignment(model.checkpoint.config, heads)
    if programs is None:
        return None
    step_s = ear.window_s / HfConfig(model.checkpoint.config).integer("max_source_positions", 1500)
    return ModelWordAligner(model, programs, step_s)
