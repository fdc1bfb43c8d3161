"""Models that read images as their publishers describe and name them: configs of transformers 4,
and the names of tensors in files of either version.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.nested_config import with_text_config
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.models.hf_config import model_info
from octavo.models.registry import build_programs, image_layout
from tests.support.tiny_images import FAMILIES, seeing_model

QWEN = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 151936,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "qwen2_vl": {
        **QWEN,
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "hidden_size": 1536,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    },
    "qwen2_5_vl": {
        **QWEN,
        "model_type": "qwen2_5_vl",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
}
GRIDS = {"gemma3": (16, 16), "qwen2_vl": (32, 32), "qwen2_5_vl": (32, 32)}
"""Rows and columns of the tokens of an image of 896 pixels a side."""


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configs_are_read_whole(family):
    config = with_text_config(PUBLISHED[family])
    programs = build_programs(config, every_key=True)
    assert list(programs) == ["decoder", "vision", "projector"]
    layout, info = image_layout(config), model_info(config)
    assert layout is not None and layout.get_grid(896, 896) == GRIDS[family]
    assert info.vocab_size == (262208 if family == "gemma3" else 151936)
    widths = {value.width for value in programs["projector"].outputs.values()}
    given = PUBLISHED[family]
    assert widths == {given.get("text_config", given)["hidden_size"]}


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
