"""A tiny Whisper with a tokenizer, whose windows are of two seconds, and sounds for it."""

from __future__ import annotations

import io
import json
import shutil
import wave
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

START, NO_TIMESTAMPS, END = 5, 6, 2
SUPPRESSED = [30, 31]
MULTILINGUAL = {
    "decoder_start_token_id": 101,
    "eos_token_id": 100,
    "no_timestamps_token_id": 160,
    "prev_sot_token_id": 106,
    "suppress_tokens": [30, 31, 101, 102, 103, 104, 105, 160],
    "begin_suppress_tokens": [100, 8],
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 102, "<|de|>": 103},
    "task_to_id": {"transcribe": 104, "translate": 105},
    "max_initial_timestamp_index": 20,
}
"""Tokens of the tiny model with languages: text below 100, times from 161 on, 0.02 s each."""


@cache
def tiny_whisper() -> Path:
    """Returns the directory of the tiny model."""
    path = tiny_model("whisper").path
    target = path.with_name("whisper-with-text")
    shutil.copytree(path, target)
    save_tiny_tokenizer(target)
    given = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [END],
        "is_multilingual": False,
    }
    (target / "generation_config.json").write_text(json.dumps(given))
    return target


@cache
def tiny_multilingual_whisper() -> Path:
    """Returns the directory of the tiny model with languages, tasks and timestamps."""
    source = tiny_whisper()
    target = source.with_name("whisper-of-languages")
    shutil.copytree(source, target)
    (target / "generation_config.json").write_text(json.dumps(MULTILINGUAL))
    return target


def noise(seed: int, seconds: float = 1.5) -> tuple[NDArray[np.float32], bytes]:
    """Returns noise of 16 kHz, and the WAV file of it."""
    drawn = np.random.default_rng(seed).standard_normal(int(16_000 * seconds)) * 3_000
    samples = drawn.astype("<i2").astype(np.float32) / (1 << 15)
    return samples, as_wav(samples)


def as_wav(samples: NDArray[np.float32]) -> bytes:
    """Returns the WAV file of samples of 16 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes((samples * (1 << 15)).astype("<i2").tobytes())
    return file.getvalue()
