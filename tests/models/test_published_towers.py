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
PIXTRAL = {
    "head_dim": 64,
    "hidden_act": "gelu",
    "image_size": 1024,
    "is_composition": True,
    "model_type": "pixtral",
    "patch_size": 16,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
NESTED: dict[str, dict[str, Any]] = {
    "mistral-small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            **PIXTRAL,
            "attention_dropout": 0.0,
            "hidden_size": 1024,
            "image_size": 1540,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
        "vision_feature_layer": -1,
    },
    "pixtral-12b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_seq_length": 1,
        "image_token_index": 10,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "is_composition": True,
            "max_position_embeddings": 1024000,
            "model_type": "mistral",
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "vision_config": PIXTRAL,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "smolvlm-500m": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_seq_len": 64,
        "image_token_id": 49190,
        "model_type": "idefics3",
        "scale_factor": 4,
        "text_config": {
            "_flash_attn_2_enabled": True,
            "architectures": ["VLlama3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 960,
            "intermediate_size": 2560,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "neftune_noise_alpha": 0.0,
            "num_attention_heads": 15,
            "num_hidden_layers": 32,
            "num_key_value_heads": 5,
            "perceiver_config": {"_attn_implementation_autoset": False, "hidden_act": "silu"},
            "pixel_shuffle_factor": 4,
            "pretraining_tp": 1,
            "qk_layer_norms": False,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": False,
            "use_resampler": False,
            "vocab_size": 49280,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "max_image_size": {"longest_edge": 512},
            "model_type": "idefics3",
            "num_attention_heads": 12,
            "patch_size": 16,
            "size": {"longest_edge": 2048},
            "tie_word_embeddings": False,
            "use_base_siglip": False,
        },
        "vocab_size": 49280,
    },
    "internvl3-1b": {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151674,
        },
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "dropout": 0.0,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 1024,
            "image_size": [448, 448],
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-06,
            "layer_scale_init_value": 0.1,
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 24,
            "patch_size": [14, 14],
            "projection_dropout": 0.0,
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    "paligemma-3b": {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "hidden_size": 2048,
        "ignore_index": -100,
        "image_token_index": 257152,
        "model_type": "paligemma",
        "pad_token_id": 0,
        "projection_dim": 2048,
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "model_type": "gemma",
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_image_tokens": 256,
            "num_key_value_heads": 1,
            "torch_dtype": "float32",
            "vocab_size": 257216,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_image_tokens": 256,
            "patch_size": 14,
            "projection_dim": 2048,
            "projector_hidden_act": "gelu_fast",
            "vision_use_head": False,
        },
        "vocab_size": 257216,
    },
    "llava-next-mistral": {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32000,
        "model_type": "llava_next",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "architectures": ["MistralForCausalLM"],
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "use_image_newline_parameter": True,
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    },
    "llava-onevision-0.5b": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384]],
        "image_token_index": 151646,
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 152000,
        },
        "tie_word_embeddings": False,
        "use_image_newline_parameter": True,
        "video_token_index": 151647,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 384,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 26,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
"""Configs of models of `image_text.py`, shortened."""
VIEWS = {
    "mistral-small-3.1": (32, 32),
    "pixtral-12b": (56, 56),
    "llava-1.5-7b": (24, 24),
    "smolvlm-500m": (8, 8),
    "internvl3-1b": (16, 16),
    "paligemma-3b": (16, 16),
    "llava-next-mistral": (24, 24),
    "llava-onevision-0.5b": (27, 27),
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
