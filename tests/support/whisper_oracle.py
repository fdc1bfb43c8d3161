"""Segments of a window's tokens as transformers cuts them for long sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import WhisperForConditionalGeneration


class OracleCut(NamedTuple):
    """Segments as (start, end, tokens), and the frames to the next window's beginning."""

    segments: list[tuple[float, float, list[int]]]
    num_frames: int


def oracle_cut(
    token_ids: Sequence[int], *, first: int, frames: int, start_s: float = 0.0, step_s: float = 0.02
) -> OracleCut:
    """Cuts a window of `frames`, each half of a step of timestamps, of which `first` is step 0."""
    whisper: Any = WhisperForConditionalGeneration
    segments, num_frames = whisper._retrieve_segment(
        seek_sequence=torch.tensor(token_ids),
        seek_outputs=[{}],
        time_offset=[torch.tensor(start_s, dtype=torch.float64)],
        timestamp_begin=first,
        seek_num_frames=[frames],
        time_precision=step_s,
        time_precision_features=step_s / 2,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.tensor([[]]),
    )
    found = [
        (
            float(one["start"]),
            float(one["end"]),
            [int(token) for token in one["tokens"] if token < first],
        )
        for one in segments
    ]
    return OracleCut(found, int(num_frames))
