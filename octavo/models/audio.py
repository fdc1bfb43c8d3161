"""Mapping from audio to the rows of a decoder that reads it, and the names of its Programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.models.hf_config import HfConfig

AUDIO, PROJECTED = "audio", "audio_projector"
"""Programs of an audio's rows, in execution order: the encoder, which has a row for each 20 or 40
ms, and the projector, which has one for each token. The first is also the encoder's cache group."""

AUDIO_TOWER = (AUDIO, PROJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLayout:
    """Mapping from an audio's log-mel frames to an encoder's rows, and its placeholder tokens."""

    token_id: int
    """Placeholder token of an audio, and of each of its rows."""
    num_bands: int
    """Mel bands of a frame."""
    window_rows: int
    """Most rows of a window, which the encoder computes by itself."""
    rows_per_token: int
    """Rows of the encoder that form one row of the decoder."""
    is_padded: bool
    """Whether audio is padded with silence to whole windows, of which it may have several; False:
    one window, whose silence at the end has no rows.
    """
    features: Literal["whisper", "usm"] = "whisper"
    """Kind of the log-mel features; a row takes two frames of Whisper's, four of USM's."""
    row_id: int | None = None
    """Token of an audio row in prompts; None: `token_id`."""
    written: tuple[int, ...] = ()
    """Tokens that replace the placeholder in a prompt, including it once; (): only itself."""


def audio_config(config: HfConfig) -> HfConfig:
    return HfConfig(config.table("audio_config"))
