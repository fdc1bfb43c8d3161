"""Models that read images as their publishers describe and name them: configs of transformers 4,
and the names of tensors in files of either version.
"""

from __future__ import annotations

import json
import re
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
QWEN3_VL_VISION = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_VL_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
    "rope_theta": 5000000,
    "use_cache": True,
    "vocab_size": 151936,
}
QWEN3_VL_TOKENS = {
    "image_token_id": 151655,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
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
    "qwen3_vl": {
        **QWEN3_VL_TOKENS,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **QWEN3_VL_TEXT,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            **QWEN3_VL_VISION,
            "model_type": "qwen3_vl",
            "out_hidden_size": 4096,
        },
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ]
            * 8,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": {
            **QWEN3_VL_VISION,
            "deepstack_visual_indexes": [],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "model_type": "qwen3_5",
            "out_hidden_size": 2560,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe",
        "text_config": {
            "hidden_size": 2048,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 256,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "vocab_size": 248320,
        },
        "video_token_id": 248057,
        "vision_config": {
            **QWEN3_VL_VISION,
            "deepstack_visual_indexes": [],
            "model_type": "qwen3_5_moe",
            "out_hidden_size": 2048,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
    "qwen3_vl_moe": {
        **QWEN3_VL_TOKENS,
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **QWEN3_VL_TEXT,
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            **QWEN3_VL_VISION,
            "model_type": "qwen3_vl_moe",
            "out_hidden_size": 2048,
        },
    },
}
GRIDS = {"gemma3": (16, 16), "qwen2_vl": (32, 32), "qwen2_5_vl": (32, 32)}
GRIDS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), (28, 28))
"""Rows and columns of the tokens of an image of 896 pixels a side."""


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
