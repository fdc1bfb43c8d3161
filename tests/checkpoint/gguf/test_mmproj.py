"""Vision towers in mmproj files of llama.cpp's converter are those of the safetensors that they
were made of, and are found beside the model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, UnsupportedModel
from octavo.checkpoint.gguf.mmproj import MmprojCheckpoint
from octavo.checkpoint.open import describe_tower_file, open_checkpoint, with_tower_file
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import audio_layout, build_programs, image_layout
from tests.support.gguf_conversion import convert
from tests.support.tiny_audio import WORDS, hearing_model, sound
from tests.support.tiny_images import COLOURS, SEEING, picture, seeing_model
from tests.support.tiny_models import tiny_model
from tests.support.tiny_other_shapes import IMAGE_ID


class Case(NamedTuple):
    """How the converter knows a family."""

    text: str
    """Class of the language model."""
    tower: str
    renamed: tuple[tuple[str, str], ...] = ()
    """Starts of names in safetensors, and of those that the converter reads."""
    written: tuple[tuple[str, Any], ...] = ()
    """Keys that the converter reads and transformers 5 no longer writes."""


GEMMA4 = Case(*("Gemma4ForConditionalGeneration",) * 2, written=(("global_head_dim", 24),))
CASES = {
    "gemma4:audio": GEMMA4,
    "gemma3": Case(
        *("Gemma3ForConditionalGeneration",) * 2,
        (("vision_tower.", "vision_tower.vision_model."),),
    ),
    "internvl": Case(
        *("Qwen2ForCausalLM", "InternVisionModel"),
        tuple((start, f"model.{start}") for start in ("vision_tower.", "multi_modal_projector.")),
    ),
    "llava:pixtral": Case(*("LlavaForConditionalGeneration",) * 2),
    "mistral3": Case(*("Mistral3ForConditionalGeneration",) * 2),
    "qwen2_audio": Case(*("Qwen2AudioForConditionalGeneration",) * 2),
    "voxtral": Case(*("VoxtralForConditionalGeneration",) * 2),
    "qwen2_vl": Case(*("Qwen2VLForConditionalGeneration",) * 2),
    "qwen2_5_vl": Case(*("Qwen2_5_VLForConditionalGeneration",) * 2),
    "qwen3_5": Case(*("Qwen3_5ForConditionalGeneration",) * 2),
    "qwen3_vl": Case(*("Qwen3VLForConditionalGeneration",) * 2),
    "smolvlm": Case("LlamaForCausalLM", "SmolVLMForConditionalGeneration"),
}
WINDOW_PIXELS = 112
"""Side of Qwen2.5-VL's windows, which a header does not state."""


PLAIN_COLOURS = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
CELL = 3
"""Side of Gemma 4's cells, which a header does not state."""


def path_of(family: str) -> Path:
    return seeing_model(family).path if family in SEEING else hearing_model(family).path


def convert_both(family: str, folder: Path) -> MmprojCheckpoint:
    """Converts a tiny model and its tower; returns the checkpoint of both."""
    case, source = CASES.get(family, GEMMA4), folder / "source"
    shutil.copytree(path_of(family), source)
    words, rules = WORDS.get(family, ()), PLAIN_COLOURS
    if family in SEEING:
        words = SEEING[family].words
        rules = COLOURS | SEEING[family].rules | {"image_seq_length": 16}  # of Gemma 3
    (source / "preprocessor_config.json").write_text(json.dumps(rules))
    file = source / "model.safetensors"
    for before, after in case.renamed:
        tensors = load_file(file)
        save_file({name.replace(before, after, 1): each for name, each in tensors.items()}, file)

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        tokens = [f"<{index}>" for index in range(320)]
        tokens[IMAGE_ID : IMAGE_ID + len(words)] = words
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(tokens))
        writer.add_token_merges([])

    model = convert(
        source,
        folder,
        name="tiny.gguf",
        add_vocabulary=add_vocabulary,
        architectures=[case.text],
        **dict(case.written),
    )
    tower = convert(source, folder, name="mmproj-F32.gguf", mmproj=True, architectures=[case.tower])
    return MmprojCheckpoint(model, tower)


@pytest.mark.parametrize("family", CASES)
def test_towers_are_those_of_the_safetensors(family: str, tmp_path: Path) -> None:
    whole = open_checkpoint(path_of(family))
    checkpoint = convert_both(family, tmp_path)
    layout = image_layout(whole.config)
    if layout is not None and layout.window is not None:
        layout = replace(layout, window=WINDOW_PIXELS // layout.multiple)
    if layout is not None and family == "gemma4:audio":
        layout = replace(layout, cell=CELL)
    assert audio_layout(checkpoint.config) == audio_layout(whole.config)
    found_layout = image_layout(checkpoint.config)
    assert found_layout == (
        layout
        if layout is None or layout.video is None or found_layout is None
        else replace(layout, video=found_layout.video)
    )
    wanted, found = build_programs(whole.config), build_programs(checkpoint.config)
    assert found.keys() == wanted.keys()
    for name in found.keys() - {"decoder"}:
        if family != "qwen3_vl":  # whose mergers have other numbers
            assert found[name] == wanted[name]
        for ours, theirs in zip(found[name].weights, wanted[name].weights, strict=True):
            if ours.fill is None:
                stored = WeightReader(checkpoint).load(ours).dequantize()
                expected = WeightReader(whole).load(theirs).dequantize()
                # The converter rounds Gemma 3's projection and Whisper's convolutions to half
                # precision.
                np.testing.assert_allclose(
                    stored, expected, rtol=1e-3, atol=1e-6, err_msg=ours.name
                )


def test_the_file_beside_a_model_is_read(tmp_path: Path) -> None:
    convert_both("qwen2_vl", tmp_path)
    model = open_checkpoint(tmp_path / "tiny.gguf")
    assert "mmproj-F32.gguf" in describe_tower_file(with_tower_file(model, None))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "threads": 1}
    lines: list[str] = []
    with LLM(str(model.path), report=lines.append, **options) as llm:
        data = {"image": [picture(0, 16, 16)]}
        prompt = {"prompt_token_ids": [5, IMAGE_ID, 6], "multi_modal_data": data}
        (seen,) = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0))
    assert len(seen.outputs[0].token_ids) == 4 and len(seen.prompt_token_ids) > 3
    assert "reads images with mmproj-F32.gguf" in lines
    with LLM(str(model.path), mmproj="none", **options) as llm:
        assert llm.generate([5, 6], SamplingParams(max_tokens=1))[0].outputs


def test_a_tower_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = convert_both("qwen2_vl", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    llama = convert(tiny_model("llama").path, other)
    with pytest.raises(UnsupportedModel, match=r"is a tower for qwen2, but .* is a llama model"):
        MmprojCheckpoint(llama, checkpoint.mmproj)
    with pytest.raises(UnsupportedModel, match="has the architecture 'qwen2vl', expected 'clip'"):
        MmprojCheckpoint(checkpoint.path, checkpoint.path)
    narrow = convert(tiny_model("qwen2", hidden_size=32).path, other, name="narrow.gguf")
    with pytest.raises(UnsupportedModel, match="projects to 64 columns, the model has hidden_size"):
        MmprojCheckpoint(narrow, checkpoint.mmproj)
    safetensors = open_checkpoint(tiny_model("llama").path)
    with pytest.raises(ConfigError, match="which is not a GGUF file"):
        with_tower_file(safetensors, checkpoint.mmproj)
    shutil.copy(checkpoint.mmproj, other)
    model = open_checkpoint(llama)
    assert with_tower_file(model, None) is model
    assert "mmproj-F32.gguf is not used: mmproj: " in describe_tower_file(model)


def test_gemma4_reads_images_and_audio_from_two_files(tmp_path: Path) -> None:
    checkpoint = convert_both("gemma4:audio", tmp_path)
    assert describe_tower_file(checkpoint) == "reads images and audio with mmproj-F32.gguf"
    media = {"image": [picture(0, 16, 16)], "audio": [sound(0)]}
    prompt = {"prompt_token_ids": [5, IMAGE_ID, 6, IMAGE_ID + 3], "multi_modal_data": media}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "threads": 1}
    with LLM(str(checkpoint.path), max_image_tokens=16, **options) as llm:
        (read,) = llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0))
    assert len(read.prompt_token_ids) > 12 and len(read.outputs[0].token_ids) == 2


def test_images_of_larger_gemma4_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="image tokens attend to one another"):
        convert_both("gemma4:standardized", tmp_path)
