"""Speech is found by its energy; pauses end its parts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.audio.voice_activity import find_speech, get_levels, join_spans

RATE = 16_000
OPTIONS = {"threshold": 0.5, "padding_s": 0.3, "silence_s": 0.2}


def sound(*parts: tuple[float, float], noise: float = 0.0005) -> NDArray[np.float32]:
    """Returns noise with parts of given lengths in seconds and loudness."""
    generator = np.random.default_rng(1)
    pieces = [
        generator.standard_normal(round(RATE * length_s)) * (noise + loudness)
        for length_s, loudness in parts
    ]
    return np.concatenate(pieces).astype(np.float32)


def test_speech_between_pauses_is_found() -> None:
    samples = sound((2, 0), (1.5, 0.1), (3, 0), (0.8, 0.05), (2, 0))
    spans = find_speech(samples, RATE, **OPTIONS)
    wanted = [(1.7, 3.7), (6.2, 7.5)]
    np.testing.assert_allclose(spans, wanted, atol=0.05)


def test_short_pauses_belong_to_the_speech() -> None:
    samples = sound((1, 0), (1, 0.1), (0.15, 0), (1, 0.1), (1, 0))
    assert len(find_speech(samples, RATE, threshold=0.5, padding_s=0.0, silence_s=0.2)) == 1
    assert len(find_speech(samples, RATE, threshold=0.5, padding_s=0.0, silence_s=0.05)) == 2


@pytest.mark.parametrize(
    ("samples", "count"),
    [
        (np.zeros(RATE, np.float32), 0),
        (np.zeros(0, np.float32), 0),
        (sound((2, 0), noise=0.0003), 0),
        (sound((2, 0.1)), 1),
        (sound((0.004, 0.1)), 1),
    ],
)
def test_silence_has_no_speech_and_steady_sound_no_pauses(
    samples: NDArray[np.float32], count: int
) -> None:
    spans = find_speech(samples, RATE, **OPTIONS)
    assert len(spans) == count
    assert not spans or spans == [(0.0, len(samples) / RATE)]


def test_parts_fit_a_window() -> None:
    samples = sound((8, 0.1), (0.4, 0.001), (7, 0.1))
    levels = get_levels(samples, RATE)
    spans = [(0.0, 15.4), (16.0, 18.0), (19.0, 19.5), (29.0, 30.0)]
    joined = join_spans(spans, levels, 10.0)
    assert joined[0][0] == 0 and 8 <= joined[0][1] <= 8.4 and joined[1][0] == joined[0][1]
    assert joined[1][1] == 18.0 and joined[2] == (19.0, 19.5) and joined[3] == (29.0, 30.0)
    assert all(end - start <= 10 for start, end in joined)
