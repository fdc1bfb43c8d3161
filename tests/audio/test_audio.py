"""WAV files, resampling and log-mel features: as others compute them, and refused where they are
none.
"""

import io
import struct
import wave

import numpy as np
import pytest
import transformers

from octavo.audio.hearing import convolved_rows
from octavo.audio.log_mel import LogMel
from octavo.audio.resampling import resample
from octavo.audio.wav import read_wav
from octavo.errors import InvalidRequest

SECOND = 60.0


def wav(samples, *, rate=16_000, num_channels=1, num_bytes=2):
    """Returns a WAV file of samples that are integers."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(num_channels)
        out.setsampwidth(num_bytes)
        out.setframerate(rate)
        out.writeframes(samples)
    return file.getvalue()


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("num_samples", [1, 1_000, 80_000, 480_000])
def test_features_are_those_of_transformers(num_bands, num_samples):
    noise = np.random.default_rng(0).standard_normal(num_samples).astype(np.float32) / 10
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_bands)
    wanted = extractor(noise, sampling_rate=16_000, return_tensors="np").input_features[0].T
    found = LogMel(num_bands).features(noise)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_001])
def test_a_tone_stays_the_same_at_another_rate(rate):
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    found = resample(tone, rate, 16_000)
    wanted = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16_000)
    assert abs(len(found) - 16_000) <= 1
    np.testing.assert_allclose(found[300:-300], wanted[300:-300], rtol=0, atol=2e-5)


def test_what_is_above_the_new_rates_half_is_gone():
    tone = np.sin(2 * np.pi * 9_500 * np.arange(48_000) / 48_000).astype(np.float32)
    assert abs(resample(tone, 48_000, 16_000)[300:-300]).max() < 1e-3


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_integers_of_every_width_are_the_same_sound(num_bytes, num_channels):
    wanted = np.linspace(-0.9, 0.9, 50)
    values = np.repeat(np.round(wanted * (1 << (8 * num_bytes - 1))), num_channels).astype(np.int64)
    if num_bytes == 1:
        data = (values + 128).astype(np.uint8).tobytes()
    else:
        data = b"".join(int(one).to_bytes(num_bytes, "little", signed=True) for one in values)
    file = wav(data, rate=8_000, num_channels=num_channels, num_bytes=num_bytes)
    sound = read_wav(file, max_seconds=SECOND)
    assert sound.rate == 8_000
    np.testing.assert_allclose(sound.samples, wanted, atol=1.01 / (1 << (8 * num_bytes - 1)))


def test_floats_are_read_and_chunks_of_other_kinds_are_passed():
    values = np.linspace(-1, 1, 20, dtype="<f4")
    layout = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    chunks = [(b"LIST", b"abc"), (b"fmt ", layout), (b"data", values.tobytes())]
    body = b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
        for name, data in chunks
    )
    file = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
    np.testing.assert_array_equal(read_wav(file, max_seconds=SECOND).samples, values)


WHOLE = wav(np.zeros(800, "<i2").tobytes())
BAD = {
    "empty": (b"", "got an empty file"),
    "no WAV": (b"ID3" + b"\0" * 100, "no WAV"),
    "header only": (WHOLE[:36], "no samples"),
    "cut off": (WHOLE[:-100], "cut off"),
    "no samples": (wav(b""), "it has no samples"),
    "too long": (wav(bytes(2 * 16_000 * 61)), "it is 61 s long; allowed are at most 60 s"),
    "low rate": (wav(bytes(100), rate=4_000), "4000 samples a second"),
    "three channels": (wav(bytes(60), num_channels=3), "3 channels"),
    "mu-law": (WHOLE.replace(struct.pack("<H", 1), struct.pack("<H", 7), 1), "format 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_told_what_to_do(name):
    data, message = BAD[name]
    with pytest.raises(InvalidRequest) as error:
        read_wav(data, max_seconds=SECOND)
    assert message in str(error.value) and "hint: " in str(error.value)


def test_a_file_cut_anywhere_is_refused_or_read():
    for end in range(len(WHOLE)):
        with pytest.raises(InvalidRequest):
            read_wav(WHOLE[:end], max_seconds=SECOND)


def test_rows_hold_the_frames_that_two_convolutions_see():
    frames = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
    rows = convolved_rows(frames)
    assert rows.shape == (3, 21)
    np.testing.assert_array_equal(rows[0, :7], 0)
    np.testing.assert_array_equal(rows[0, 7:14], [0, 0, 1, 2, 3, 4, 1])
    np.testing.assert_array_equal(rows[2, 14:], [9, 10, 11, 12, 0, 0, 1])
