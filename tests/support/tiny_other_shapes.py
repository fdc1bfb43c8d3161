"""Sizes of the tiny encoders and of the tiny models that read images, in the words of their
transformers configs.

Plain tables, as in `tiny_shapes.py`; `tiny_encoders.py` and `tiny_images.py` build the models.
"""

from __future__ import annotations

from typing import Any

SHAPE = {
    "vocab_size": 130,
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 400,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": 72, "n_layers": 3, "n_heads": 4, "hidden_dim": 90},
    "roberta": {},
    "xlm-roberta": {},
    "mpnet": {},
    "nomic_bert": {},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 12,
        "max_relative_positions": 60,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pooler_hidden_size": 72,
    },
    "albert": {"embedding_size": 24, "num_hidden_groups": 2, "inner_group_num": 2},
    "camembert": {},
    "electra": {"embedding_size": 24},
    "eurobert": {
        "num_key_value_heads": 2,
        "head_dim": 20,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), 1),
    },
    "gte": {"type_vocab_size": 2},
    "jina_embeddings_v3": {},
    "modernbert": {"local_attention": 20, "pad_token_id": 0, "num_hidden_layers": 4},
}

IMAGE_ID, BEGIN_ID, END_ID = 300, 301, 302
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
QWEN_TEXT = {**TEXT, "num_hidden_layers": 2, "rope_parameters": MROPE}
QWEN_TOKENS = {"image_token_id": IMAGE_ID, "vision_start_token_id": BEGIN_ID}
QWEN_TOKENS |= {"vision_end_token_id": END_ID, "video_token_id": 303}
QWEN3_VL_TEXT = {**TEXT, "num_hidden_layers": 3, "head_dim": 20}
QWEN3_VL_TEXT |= {"rope_parameters": MROPE | {"mrope_section": [4, 3, 3]}}
QWEN3_VL_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [2, 0],
}
QWEN3_5_TEXT = {
    **TEXT,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
}
QWEN3_5_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
PLAIN_TEXT = {**TEXT, "num_hidden_layers": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **TEXT,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE_ID,
        "boi_token_index": BEGIN_ID,
        "eoi_token_index": END_ID,
    },
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "mlp_ratio": 2,
        },
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
        },
        **QWEN_TOKENS,
    },
    "qwen3_5": {"text_config": QWEN3_5_TEXT, "vision_config": QWEN3_5_VISION, **QWEN_TOKENS},
    "qwen3_5_moe": {
        "text_config": QWEN3_5_TEXT
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 34,
            "shared_expert_intermediate_size": 46,
        },
        "vision_config": QWEN3_5_VISION,
        **QWEN_TOKENS,
    },
    "qwen3_vl": {"text_config": QWEN3_VL_TEXT, "vision_config": QWEN3_VL_VISION, **QWEN_TOKENS},
    "qwen3_vl_moe": {
        "text_config": QWEN3_VL_TEXT
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 34,
            "mlp_only_layers": [2],
        },
        "vision_config": QWEN3_VL_VISION,
        **QWEN_TOKENS,
    },
}

IDEFICS3 = {
    "text_config": {**PLAIN_TEXT, "model_type": "llama"},
    "vision_config": {**VISION, "image_size": 16},
    "image_token_id": IMAGE_ID,
}
IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {**PLAIN_TEXT, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**VISION, "model_type": "pixtral", "image_size": 64},
        "image_token_index": IMAGE_ID,
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": {**PLAIN_TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 24},
        "image_token_index": IMAGE_ID,
    },
    "llava:pixtral": {
        "text_config": {**PLAIN_TEXT, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**VISION, "model_type": "pixtral", "image_size": 64},
        "image_token_index": IMAGE_ID,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3,
    "internvl": {
        "text_config": {**PLAIN_TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
        | {"num_hidden_layers": 4},  # as llama.cpp's converter maps names up to this number
        "image_token_id": IMAGE_ID,
        "tie_word_embeddings": False,
    },
    "internvl:6b": {
        "text_config": {**PLAIN_TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
        | {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True}
        | {"use_mean_pooling": False},
        "image_token_id": IMAGE_ID,
    },
    "paligemma": {
        "text_config": {**PLAIN_TEXT, "model_type": "gemma", "head_dim": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 16},
        "image_token_index": IMAGE_ID,
        "projection_dim": 64,
    },
    "paligemma:2": {
        "text_config": {**PLAIN_TEXT, "model_type": "gemma2", "head_dim": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 16},
        "image_token_index": IMAGE_ID,
        "projection_dim": 64,
    },
    "llava_next": {
        "text_config": {**PLAIN_TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 16},
        "image_token_index": IMAGE_ID,
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [16, 48]],
    },
    "llava_onevision": {
        "text_config": {**PLAIN_TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 16},
        "image_token_index": IMAGE_ID,
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 48], [48, 32], [48, 48]],
        "vision_aspect_ratio": "anyres_max_3",
    },
    "llava:siglip": {
        "text_config": {**PLAIN_TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 27},
        "image_token_index": IMAGE_ID,
        "vision_feature_select_strategy": "full",
    },
}
"""Models of `image_text.py` and Gemma 4: by model type, and after a colon what distinguishes
several of one.
"""

AUDIO_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "text_config": {**PLAIN_TEXT, "model_type": "qwen2"},
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 3,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 24,
        },
        "audio_token_index": IMAGE_ID,
    },
    "voxtral": {
        "text_config": {**PLAIN_TEXT, "model_type": "llama", "head_dim": 16},
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "num_mel_bins": 8,
            "max_source_positions": 24,
        },
        "audio_token_id": IMAGE_ID,
    },
}
"""Models that read audio. A window of those of `audio_text.py` is 0.48 s long."""

GEMMA4_TEXT = {
    **TEXT,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
GEMMA4_VISION = {
    **VISION,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
}
GEMMA4_TOKENS = {"image_token_id": IMAGE_ID, "boi_token_id": BEGIN_ID, "eoi_token_id": END_ID}
GEMMA4_TOKENS |= {"video_token_id": 303, "audio_token_id": 304, "audio_config": None}
IMAGE_TEXT |= {
    "gemma4:clipped": {
        "text_config": GEMMA4_TEXT
        | {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 20},
        "vision_config": GEMMA4_VISION | {"use_clipped_linears": True},
        **GEMMA4_TOKENS,
    },
    "gemma4:standardized": {
        "text_config": GEMMA4_TEXT | {"hidden_size_per_layer_input": 0},
        "vision_config": GEMMA4_VISION | {"standardize": True},
        **GEMMA4_TOKENS,
    },
}
GEMMA4_AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 40,
}
AUDIO_TEXT |= {
    "gemma4:audio": {
        "text_config": GEMMA4_TEXT
        | {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 20},
        "vision_config": GEMMA4_VISION,
        "audio_config": GEMMA4_AUDIO,
        "audio_token_id": IMAGE_ID,
        "boa_token_id": 301,
        "eoa_token_index": 302,
        "image_token_id": 303,
        "boi_token_id": 304,
        "eoi_token_id": 305,
        "video_token_id": 306,
    },
}
TEXT_ONLY: dict[str, dict[str, Any]] = {
    "gemma4": {
        "text_config": GEMMA4_TEXT
        | {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 20},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 32,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 40,
        },
    },
    "gemma4_unified": {
        "text_config": GEMMA4_TEXT,
        "vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 20},
    },
}
"""Tiny models with towers, which are asked in text."""
