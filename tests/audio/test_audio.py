"""Sound files, resampling and log-mel features: as others compute them, and refused where they are
none.
"""

import io
import struct
import sys
import wave

import numpy as np
import pytest
import soundfile
import transformers

from octavo.api.errors import InvalidRequest
from octavo.audio.audio_reader import convolved_rows, decode_sound
from octavo.audio.log_mel import LogMel

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


def encoded(samples, rate, kind="WAV", subtype="FLOAT"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
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
    found = decode_sound(encoded(tone, rate), 16_000, max_seconds=SECOND)
    wanted = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16_000)
    assert abs(len(found) - 16_000) <= 1
    np.testing.assert_allclose(found[300:-300], wanted[300:-300], rtol=0, atol=2e-5)


def test_what_is_above_the_new_rates_half_is_gone():
    tone = np.sin(2 * np.pi * 9_500 * np.arange(48_000) / 48_000).astype(np.float32)
    found = decode_sound(encoded(tone, 48_000), 16_000, max_seconds=SECOND)
    assert abs(found[300:-300]).max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "subtype", "bound"),
    [
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.03),
        ("MP3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_compressed_files_are_the_same_sound(kind, subtype, bound):
    tone = np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000) / 2
    data = encoded(tone, 24_000, kind, subtype)
    found = decode_sound(data, 16_000, max_seconds=SECOND)
    wanted = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) / 2
    np.testing.assert_allclose(found[1000:15_000], wanted[1000:15_000], rtol=0, atol=bound)


def test_without_the_extra_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'octavo\[audio\]'"):
        decode_sound(WHOLE, 16_000, max_seconds=SECOND)


def test_a_sound_that_is_longer_than_its_header_tells_is_bounded():
    """An MP3 file tells no length; its frames are counted while they are decoded."""
    data = encoded(np.zeros(16_000 * 3), 16_000, "MP3", "MPEG_LAYER_III")
    with pytest.raises(InvalidRequest, match="expected at most 2 s"):
        decode_sound(data, 16_000, max_seconds=2.0)


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
    found = decode_sound(file, 8_000, max_seconds=SECOND)
    np.testing.assert_allclose(found, wanted, atol=1.01 / (1 << (8 * num_bytes - 1)))


def test_floats_are_read_and_chunks_of_other_kinds_are_passed():
    values = np.linspace(-1, 1, 20, dtype="<f4")
    layout = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    chunks = [(b"LIST", b"abc"), (b"fmt ", layout), (b"data", values.tobytes())]
    body = b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
        for name, data in chunks
    )
    file = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
    np.testing.assert_array_equal(decode_sound(file, 16_000, max_seconds=SECOND), values)


WHOLE = wav(np.zeros(800, "<i2").tobytes())
BAD = {
    "empty": (b"", "got an empty file"),
    "no sound": (b"ID3" + b"\0" * 100, "Format not recognised"),
    "header only": (WHOLE[:36], "it cannot be read"),
    "cut off": (WHOLE[:-100], "truncated"),
    "no samples": (wav(b""), "it has no samples"),
    "too long": (wav(bytes(2 * 16_000 * 61)), "it is 61 s long; expected at most 60 s"),
    "low rate": (wav(bytes(100), rate=4_000), "4000 samples a second"),
    "three channels": (wav(bytes(60), num_channels=3), "3 channels"),
    "other format": (encoded(np.zeros(100), 16_000, "AIFF", "PCM_16"), "format AIFF; expected"),
    "NaN": (encoded(np.full(100, np.nan), 16_000), "contain NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_told_what_to_do(name):
    data, message = BAD[name]
    with pytest.raises(InvalidRequest) as error:
        decode_sound(data, 16_000, max_seconds=SECOND)
    assert message in str(error.value) and "hint: " in str(error.value)


def test_a_file_cut_anywhere_is_refused():
    for end in range(len(WHOLE)):
        with pytest.raises(InvalidRequest):
            decode_sound(WHOLE[:end], 16_000, max_seconds=SECOND)


def test_rows_hold_the_frames_that_two_convolutions_see():
    frames = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
    rows = convolved_rows(frames)
    assert rows.shape == (3, 21)
    np.testing.assert_array_equal(rows[0, :7], 0)
    np.testing.assert_array_equal(rows[0, 7:14], [0, 0, 1, 2, 3, 4, 1])
    np.testing.assert_array_equal(rows[2, 14:], [9, 10, 11, 12, 0, 0, 1])
