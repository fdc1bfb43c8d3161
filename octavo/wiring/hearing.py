"""Puts together what a model that hears needs: its ear and its tokens, from the checkpoint's
configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.audio.hearing import Ear, HeardWindow
from octavo.audio.log_mel import LogMel
from octavo.engine.front.input_processor import InputProcessor
from octavo.engine.front.transcriptions import (
    Hearing,
    SoundWindow,
    SpeechTokens,
    Transcriptions,
)
from octavo.models.hf_config import HfConfig
from octavo.program.ops import ScatterRows
from octavo.step import EncoderInput
from octavo.wiring.model import Model


@dataclass(frozen=True, slots=True)
class ModelHearing(Hearing):
    """Reads sounds with a model's ear."""

    ear: Ear

    def windows(self, data: bytes) -> list[SoundWindow]:
        return [
            SoundWindow(partial(self._input, heard), heard.start_s, heard.end_s)
            for heard in self.ear.hear(data)
        ]

    def _input(self, window: HeardWindow) -> EncoderInput:
        heard = self.ear.rows(window)
        return EncoderInput(heard.digest, rows=heard.rows, num_rows=heard.num_rows)


def hears(model: Model) -> bool:
    """Returns whether the model's encoder takes rows of a sound."""
    return any(
        isinstance(op, ScatterRows) for program in model.programs()[1:] for op in program.ops
    )


def transcriptions_of(model: Model, inputs: InputProcessor) -> Transcriptions | None:
    """Makes what turns sounds into requests; None for a model that does not hear."""
    if not hears(model):
        return None
    config = HfConfig(model.checkpoint.config)
    num_frames = 2 * config.integer("max_source_positions", 1500, low=1)
    ear = Ear(LogMel(config.size("num_mel_bins", 80), num_frames))
    max_context = config.integer("max_target_positions", 448, low=1)
    tokens = _tokens(model.checkpoint.config | model.checkpoint.generation_config, max_context)
    return Transcriptions(ModelHearing(ear), tokens, inputs)


def _tokens(values: Mapping[str, Any], max_context: int) -> SpeechTokens:
    given = HfConfig(values)
    languages = given.table("lang_to_id") if given.flag("is_multilingual", True) else {}
    return SpeechTokens(
        start=given.integer("decoder_start_token_id"),
        languages={name.strip("<|>"): int(token) for name, token in languages.items()},
        tasks=given.table("task_to_id") if languages else {},
        no_timestamps=given.optional_integer("no_timestamps_token_id"),
        banned_at_start=tuple(
            token
            for token in given.integers("begin_suppress_tokens")
            if token not in given.integers("eos_token_id") and token < given.integer("vocab_size")
        ),
        max_tokens=max_context // 2,
    )
