"""Models that read images as their publishers describe and name them: configs of transformers 4,
and the names of tensors in files of either version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.nested_config import with_text_config
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader
from octavo.models.hf_config import model_info
from octavo.models.registry import build_programs, image_layout
from tests.support.tiny_images import FAMILIES, seeing_model

CONFIGS = json.loads(Path("tests/data/published_image_configs.json").read_text())
PUBLISHED: dict[str, dict[str, Any]] = CONFIGS["families"]
"""Configs by family, shortened."""
NESTED: dict[str, dict[str, Any]] = CONFIGS["nested"]
"""Configs of models of `image_text.py` and Gemma 4 by name, shortened."""
GRIDS = {"gemma3": (16, 16), "qwen2_vl": (32, 32), "qwen2_5_vl": (32, 32)}
GRIDS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), (28, 28))
"""Rows and columns of the tokens of an image of 896 pixels a side."""
VIEWS = {
    "mistral-small-3.1": (32, 32),
    "pixtral-12b": (56, 56),
    "llava-1.5-7b": (24, 24),
    "smolvlm-500m": (8, 8),
    "internvl3-1b": (16, 16),
    "paligemma-3b": (16, 16),
    "llava-next-mistral": (24, 24),
    "llava-onevision-0.5b": (27, 27),
    "gemma-4-small": (18, 18),
}
"""Rows and columns of the tokens of a view: of the tower's side, or of 896 pixels."""


@pytest.mark.parametrize("name", NESTED)
def test_published_configs_of_two_models_are_read_whole(name):
    config = with_text_config(NESTED[name])
    programs = build_programs(config, every_key=True)
    assert list(programs)[:3] == ["decoder", "vision", "projector"]
    layout = image_layout(config)
    assert layout is not None
    side = layout.side or 896
    assert layout.get_grid(side, side) == VIEWS[name]
    widths = {value.width for value in programs["projector"].outputs.values()}
    assert widths == {config["hidden_size"]}
    broken = {**config, "vision_config": {**config["vision_config"], "uses_registers": 4}}
    with pytest.raises(UnsupportedModel, match="uses_registers"):
        build_programs(broken, every_key=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configs_are_read_whole(family):
    config = with_text_config(PUBLISHED[family])
    programs = build_programs(config, every_key=True)
    assert list(programs) == ["decoder", "vision", "projector"]
    layout, info = image_layout(config), model_info(config)
    assert layout is not None and layout.get_grid(896, 896) == GRIDS[family]
    sizes = {"gemma3": 262208, "qwen3_5": 248320, "qwen3_5_moe": 248320}
    assert info.vocab_size == sizes.get(family, 151936)
    widths = {value.width for value in programs["projector"].outputs.values()}
    given = PUBLISHED[family]
    assert widths == {layout.num_levels * given.get("text_config", given)["hidden_size"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_the_tower_that_nothing_reads_is_refused(family):
    published = PUBLISHED[family]
    vision = {**published["vision_config"], "uses_registers": 4}
    with pytest.raises(UnsupportedModel, match="uses_registers"):
        build_programs(with_text_config({**published, "vision_config": vision}), every_key=True)


NAMES = {
    "as transformers 4 keeps them": [
        (r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model."),
    ],
    "as transformers 5 computes with them": [
        (r"^language_model\.model\.", "model.language_model."),
        (r"^model\.(?!language_model)", "model.language_model."),
        (r"^(vision_tower|multi_modal_projector|visual)\.", r"model.\1."),
    ],
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_found_under_names_of_either_version(family, names, tmp_path):
    source = seeing_model(family).path
    tensors = load_file(source / "model.safetensors")
    for pattern, name in NAMES[names]:
        tensors = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint, build_programs(checkpoint.config, every_key=True).values())
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family


def test_experts_are_read_in_either_order(tmp_path):
    """Published files have a layer's experts as [E, in, out], those of transformers 5 as [E, out,
    in].
    """
    source = seeing_model("qwen3_vl_moe").path
    tensors = load_file(source / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    published, saved = open_checkpoint(tmp_path), open_checkpoint(source)
    programs = build_programs(saved.config)
    check_tensors(published, programs.values())
    readers = [WeightReader(checkpoint, "float32") for checkpoint in (published, saved)]
    for weight in programs["decoder"].weights:
        if ".experts." in weight.name:
            one, other = (reader.load(weight).dequantize() for reader in readers)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([0, 27], r"\[0, 27\], expected different layers from 0 to 26"),
        ([3, 3], r"\[3, 3\], expected different layers from 0 to 26"),
    ],
)
def test_deepstack_layers_are_layers_of_the_tower(layers, said):
    published = PUBLISHED["qwen3_vl"]
    vision = {**published["vision_config"], "deepstack_visual_indexes": layers}
    with pytest.raises(UnsupportedModel, match=said):
        build_programs(with_text_config({**published, "vision_config": vision}))
