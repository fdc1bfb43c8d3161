"""Decoders that read audio give transformers' logits over the features of its own extractor, and
the same bits however a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Gemma4AudioFeatureExtractor, WhisperFeatureExtractor
from transformers.models.whisper import feature_extraction_whisper

from octavo.audio.usm_mel import usm_features
from octavo.frontend.media import PromptWithMedia
from octavo.text.ports import AudioSource
from tests.models.test_images import SeeingRunner
from tests.support.tiny_audio import PLACES, hearing_model, sound
from tests.support.tiny_models import double_precision, in_float64
from tests.support.tiny_other_shapes import IMAGE_ID

TOLERANCE = {"reference": 1e-6, "torch": 3e-5, "native": 3e-5}
"""Features are rounded to fp32 before the reference computes in float64."""
BANDS, ROWS = 8, 24
"""Mel bands, and rows of a window."""
SECONDS = {"qwen2_audio": (0.3, 0.211), "voxtral": (0.7, 0.3), "gemma4:audio": (0.9, 0.311)}
"""Lengths of two sounds; a window is 0.48 s."""


@cache
def runner(family: str, backend: str) -> SeeingRunner:
    return SeeingRunner(hearing_model(family).path, backend)


@cache
def oracle(family: str) -> Any:
    return in_float64(hearing_model(family).model)


def placed(run: SeeingRunner, family: str, *seeds: int) -> PromptWithMedia:
    place = PLACES[family]
    text = f"Hear: {place} and then {place}. What is said?" if len(seeds) > 1 else f"{place}!"
    assert run.tokenizer is not None
    ids = run.tokenizer.encode(run.images.replaced(text), allow_special_text=True)
    return run.images.placed(ids, [AudioSource(one) for one in sounds(family, seeds)])


def sounds(family: str, seeds: Sequence[int]) -> list[NDArray[np.float32]]:
    return [sound(seed, SECONDS[family][seed]) for seed in seeds]


def features(family: str, seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns the features of transformers' processors."""
    if family == "gemma4:audio":
        return gemma4_features(sounds(family, seeds))
    window = 2 * ROWS * 160
    extractor = WhisperFeatureExtractor(BANDS, chunk_length=30)
    extractor.n_samples, extractor.nb_max_frames = window, 2 * ROWS
    made = []
    masks = []
    for samples in sounds(family, seeds):
        length = -(-len(samples) // window) * window
        with mock.patch.object(feature_extraction_whisper, "is_torch_available", bool):
            found = extractor(  # in NumPy, in float64
                samples,
                sampling_rate=16_000,
                padding="max_length",
                max_length=length,
                truncation=False,
                return_attention_mask=True,
                return_tensors="np",
            )
        windows = found["input_features"].reshape(BANDS, -1, 2 * ROWS).swapaxes(0, 1)
        made.append(torch.tensor(windows).double())
        masks.append(torch.tensor(found["attention_mask"]))
    inputs = {"input_features": torch.cat(made)}
    if family == "qwen2_audio":
        inputs["feature_attention_mask"] = torch.cat(masks)
    return inputs


def gemma4_features(sounds: Sequence[NDArray[np.float32]]) -> dict[str, torch.Tensor]:
    """Returns our features, after comparing them with those of transformers, which are rounded."""
    found = Gemma4AudioFeatureExtractor(BANDS)(sounds)
    made = torch.zeros(np.shape(found["input_features"])).double()
    for index, (samples, mask) in enumerate(zip(sounds, found["input_features_mask"], strict=True)):
        frames = usm_features(samples, BANDS)
        np.testing.assert_allclose(frames, found["input_features"][index][mask], atol=1e-5)
        made[index, : len(frames)] = torch.tensor(frames)
    return {
        "input_features": made,
        "input_features_mask": torch.tensor(np.array(found["input_features_mask"])),
    }


@pytest.mark.parametrize("backend", TOLERANCE)
@pytest.mark.parametrize("family", PLACES)
def test_logits_equal_transformers(family, backend):
    run = runner(family, backend)
    prompt = placed(run, family, 0, 1)
    (found,) = run.logits([prompt], [[len(prompt.token_ids)]])
    ids = torch.tensor([prompt.token_ids])
    assert len({item.num_tokens for item in prompt.media}) == (1 if family == "voxtral" else 2)
    for item in prompt.media:  # Gemma 4's rows are padding tokens
        ids[:, item.start : item.start + item.num_tokens] = IMAGE_ID
    assert int((ids == IMAGE_ID).sum()) == sum(item.num_tokens for item in prompt.media)
    with double_precision():
        wanted = oracle(family)(input_ids=ids, use_cache=False, **features(family, (0, 1))).logits
    error = np.abs(found - wanted[0].numpy()).max() / wanted.abs().max()
    assert error < TOLERANCE[backend]


@pytest.mark.parametrize("family", PLACES)
def test_alone_batched_and_chunked_are_the_same_bits(family):
    run = runner(family, "native")
    first, second = placed(run, family, 0, 1), placed(run, family, 1)
    together = run.logits([first, second], [[len(first.token_ids), len(second.token_ids)]])
    for prompt, wanted in zip([first, second], together, strict=True):
        (alone,) = run.logits([prompt], [[len(prompt.token_ids)]])
        np.testing.assert_array_equal(alone, wanted)
    count = len(first.token_ids)
    steps = [[min(7, count - start)] for start in range(0, count, 7)]
    (chunked,) = run.logits([first], steps)
    np.testing.assert_array_equal(chunked, together[0])
