"""Words have the times that transformers' cross-attention and dynamic time warping give the tokens
of the same transcript.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from octavo.api.errors import InvalidRequest, UnsupportedModel
from octavo.audio.log_mel import LogMel
from octavo.audio.word_alignment import find_token_steps
from octavo.frontend.words import split_words
from tests.support.llm_tools import make_llm
from tests.support.tiny_models import tiny_model
from tests.support.tiny_whisper import MULTILINGUAL, noise, tiny_multilingual_whisper

OPTIONS = {"skip_tokenizer_init": False, "max_model_len": 64}
HEADS = [[0, 1], [1, 0], [1, 3]]
STEP_S = 0.02


def oracle_steps(weights: torch.Tensor) -> list[int]:
    """Returns the steps at which tokens begin, from weights `[H, T, S]`, as transformers does."""
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    matrix = _median_filter((weights - mean) / std, 7).mean(dim=0)
    text, time = _dynamic_time_warping(-matrix.double().numpy())
    return time[np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)].tolist()


def expected_times(samples: Any, prompt: list[int], tokens: list[int], heads: Any) -> list[float]:
    model = tiny_model("whisper").model
    config = model.config
    features = LogMel(config.num_mel_bins, 2 * config.max_source_positions).features(samples)
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        found = model(
            torch.tensor(features.T[None]), decoder_input_ids=ids, output_attentions=True
        ).cross_attentions
    num_steps = round(len(samples) / 16_000 / STEP_S)
    weights = torch.stack([found[layer][0, head] for layer, head in heads])
    return [STEP_S * at for at in oracle_steps(weights[:, len(prompt) - 1 :, :num_steps])]


def speech_model(folder: Path, **config: Any) -> Path:
    target = folder / "model"
    shutil.copytree(tiny_multilingual_whisper(), target)
    (target / "generation_config.json").write_text(json.dumps(MULTILINGUAL | config))
    return target


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_transformers(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = (3, int(generator.integers(2, 12)), int(generator.integers(5, 90)))
    weights = torch.tensor(generator.random(shape)).softmax(dim=-1)
    assert find_token_steps(weights.numpy(), shape[2]) == oracle_steps(weights)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("heads", [HEADS, []])
def test_words_have_the_times_of_transformers(tmp_path: Path, backend: str, heads: Any) -> None:
    samples, data = noise(4, 1.6)
    path = speech_model(tmp_path, alignment_heads=heads)
    stack = tiny_model("whisper").config
    layers, count = stack["decoder_layers"], stack["decoder_attention_heads"]
    used = heads or [(a, b) for a in range(layers // 2, layers) for b in range(count)]
    with make_llm(model_path=path, backend=backend, **OPTIONS) as llm:
        (text,) = llm.transcribe(data, language="en", words=True, use_tqdm=False)
        (plain,) = llm.transcribe(data, language="en", use_tqdm=False)
        decode = llm.get_tokenizer().decode
    assert text.segments == plain.segments and plain.words == []
    tokens = [token for token in text.segments[0].token_ids if token != 100]
    times = expected_times(samples, [101, 102, 104, 160], tokens, used)
    wanted = [
        (word.text.strip(), times[word.start], times[word.end])
        for word in split_words(tokens, decode, "en")
    ]
    assert [word.word for word in text.words] == [word for word, _, _ in wanted]
    found = [(word.start_s, word.end_s) for word in text.words]
    np.testing.assert_allclose(found, [times for _, *times in wanted], atol=1e-3)


def test_words_follow_each_other_over_windows(tmp_path: Path) -> None:
    path = speech_model(tmp_path)
    with make_llm(model_path=path, backend="native", **OPTIONS) as llm:
        how = {"language": "en", "words": True, "use_tqdm": False}
        for timestamps in (False, True):
            (text,) = llm.transcribe(noise(6, 5.0)[1], timestamps=timestamps, **how)
            assert text.words[-1].end_s > 2
            for word in text.words:
                assert 0 <= word.start_s <= word.end_s <= 5.0


def test_an_unknown_head_is_rejected(tmp_path: Path) -> None:
    path = speech_model(tmp_path, alignment_heads=[[9, 0]])
    with pytest.raises(UnsupportedModel, match=r"alignment_heads has \[9, 0\], expected layers up"):
        make_llm(model_path=path, backend="native", **OPTIONS)


def test_a_backend_without_words_rejects_them(tmp_path: Path) -> None:
    path = speech_model(tmp_path)
    options = OPTIONS | {"batch_invariant": False}
    with (
        make_llm(model_path=path, backend="torch", **options) as llm,
        pytest.raises(InvalidRequest, match="words: got true, but this model or backend"),
    ):
        llm.transcribe(noise(1)[1], language="en", words=True)
