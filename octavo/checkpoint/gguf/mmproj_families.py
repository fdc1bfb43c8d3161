"""Mapping from the towers of llama.cpp's mmproj files to Hugging Face families: config keys
and tensor names by projector type.

Reads headers only; `mmproj.py` reads the tensors. Source: llama.cpp's converter (`MmprojModel` and
its subclasses) and `tools/mtmd/clip.cpp` (defaults).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.checkpoint.gguf.gguf_family import Config, Header, Restored, halves
from octavo.checkpoint.gguf.mmproj_gemma4 import GEMMA4
from octavo.checkpoint.gguf.mmproj_projector import Projector, TowerFile
from octavo.checkpoint.gguf.mmproj_whisper import QWEN2_AUDIO, VOXTRAL

QWEN_TOKENS = (8, 4096)
"""Fewest and most tokens of an image for Qwen-VL, as in llama.cpp."""


_VIT_LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_VIT_TOP = {
    "patch_embd": "embeddings.patch_embedding",
    "position_embd": "embeddings.position_embedding",
    "post_ln": "post_layernorm",
}


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {stem: f"{prefix}{name}" for stem, name in names.items()}


# -- Gemma 3 ---------------------------------------------------------------------------------------


def _gemma3_config(tower: TowerFile) -> Config:
    sizes = tower.sizes()
    cell = tower.header.count("vision.projector.scale_factor", 4)
    return {
        "image_token_index": tower.find_token("<image_soft_token>", 262_144),
        "boi_token_index": tower.find_token("<start_of_image>", 255_999),
        "eoi_token_index": tower.find_token("<end_of_image>", 256_000),
        "mm_tokens_per_image": (sizes["image_size"] // sizes["patch_size"] // cell) ** 2,
        "vision_config": sizes | {"layer_norm_eps": tower.eps},
    }


def _square_processor(tower: TowerFile) -> Config:
    side = tower.vision("image_size")
    return {"size": {"height": side, "width": side}}


GEMMA3 = Projector(
    families={"gemma3_text": "gemma3"},
    config=_gemma3_config,
    processor=_square_processor,
    tensors=_under("vision_tower.", _VIT_TOP)
    | {
        "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    layer_tensors=_VIT_LAYER,
    layer_prefix="vision_tower.encoder.layers",
    whole_names=frozenset({"mm.input_projection"}),
    restored={
        "multi_modal_projector.mm_input_projection_weight": Restored(
            lambda shape: shape[::-1], np.transpose
        ),
        "multi_modal_projector.mm_soft_emb_norm.weight": Restored(
            lambda shape: shape, lambda weight: weight - np.float32(1)
        ),
    },
)


# -- Idefics 3 and SmolVLM -------------------------------------------------------------------------


def _idefics3_config(tower: TowerFile) -> Config:
    return {
        "image_token_id": tower.find_token("<image>", 128_257),
        "scale_factor": tower.header.count("vision.projector.scale_factor", 2),
        "vision_config": tower.sizes() | {"layer_norm_eps": tower.eps},
    }


def _idefics3_processor(tower: TowerFile) -> Config:
    side = tower.vision("image_size")
    edge = tower.header.count("vision.preproc_image_size", 4 * side)
    return {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": side}}


IDEFICS3 = Projector(
    families={"llama": "idefics3"},
    has_text_type=True,
    config=_idefics3_config,
    processor=_idefics3_processor,
    tensors=_under("model.vision_model.", _VIT_TOP)
    | {"mm.model.fc": "model.connector.modality_projection.proj"},
    layer_tensors=_VIT_LAYER,
    layer_prefix="model.vision_model.encoder.layers",
)


# -- InternVL --------------------------------------------------------------------------------------


def _internvl_config(tower: TowerFile) -> Config:
    has = tower.header.has
    return {
        "image_token_id": tower.find_token("<IMG_CONTEXT>", 151_667),
        "downsample_ratio": 1 / tower.header.count("vision.projector.scale_factor", 2),
        "vision_config": tower.sizes()
        | {
            "hidden_act": tower.activation,
            "layer_norm_eps": tower.eps,
            "attention_bias": has("v.blk.0.attn_q.bias"),
            "use_qk_norm": has("v.blk.0.attn_q_norm.weight"),
            "norm_type": "layer_norm" if has("v.blk.0.ln1.bias") else "rms_norm",
            "use_mean_pooling": not has("v.post_ln.weight"),
        },
    }


def _internvl_processor(tower: TowerFile) -> Config:
    return _square_processor(tower) | {
        "min_patches": tower.header.count("vision.preproc_min_tiles", 1),
        "max_patches": tower.header.count("vision.preproc_max_tiles", 12),
    }


INTERNVL = Projector(
    families=dict.fromkeys(("qwen2", "qwen3", "llama"), "internvl"),
    has_text_type=True,
    config=_internvl_config,
    processor=_internvl_processor,
    tensors=_under(
        "vision_tower.",
        {
            "class_embd": "embeddings.cls_token",
            "patch_embd": "embeddings.patch_embeddings.projection",
            "position_embd": "embeddings.position_embeddings",
            "post_ln": "layernorm",
        },
    )
    | {
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    },
    layer_tensors={
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "ls1": "lambda_1",
        "ls2": "lambda_2",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_q_norm": "attention.q_norm",
        "attn_k_norm": "attention.k_norm",
        "attn_out": "attention.projection_layer",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    layer_prefix="vision_tower.encoder.layer",
    whole_names=frozenset({"class_embd", "position_embd", "ls1", "ls2"}),
    restored={
        f"vision_tower.embeddings.{name}": Restored(
            lambda shape: (1, math.prod(shape[:-1]), shape[-1]),
            lambda rows: rows.reshape(1, -1, rows.shape[-1]),
        )
        for name in ("cls_token", "position_embeddings")
    },
)


# -- Pixtral and Mistral 3 -------------------------------------------------------------------------


def _pixtral_config(tower: TowerFile) -> Config:
    merges = tower.header.has("mm.patch_merger.weight")
    own: Config = {"spatial_merge_size": tower.header.count("vision.spatial_merge_size", 2)}
    return {
        "model_type": "mistral3" if merges else "llava",
        "image_token_index": tower.find_token("[IMG]", 10),
        "vision_feature_layer": -1,
        **(own if merges else {"vision_feature_select_strategy": "full"}),
        "multimodal_projector_bias": tower.header.has("mm.1.bias"),
        "vision_config": tower.sizes()
        | {
            "model_type": "pixtral",
            "hidden_act": tower.activation,
            "rope_theta": float(tower.header.number("vision.rope.freq_base", 10_000.0)),
        },
    }


def _edge_processor(tower: TowerFile) -> Config:
    return {"size": {"longest_edge": tower.vision("image_size")}}


PIXTRAL = Projector(
    families=dict.fromkeys(("llama", "ministral3"), "llava"),
    has_text_type=True,
    config=_pixtral_config,
    processor=_edge_processor,
    tensors={
        "patch_embd": "vision_tower.patch_conv",
        "pre_ln": "vision_tower.ln_pre",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        "mm.input_norm": "multi_modal_projector.norm",
    },
    layer_tensors={
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    layer_prefix="vision_tower.transformer.layers",
    row_orders=dict.fromkeys(("attn_q", "attn_k"), halves("num_attention_heads")),
    unread=frozenset({"v.token_embd.img_break"}),
)


# -- Qwen-VL ---------------------------------------------------------------------------------------


def _qwen_sizes(tower: TowerFile) -> Config:
    sizes = tower.sizes()
    return {
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "depth": sizes["num_hidden_layers"],
        "num_heads": sizes["num_attention_heads"],
        "patch_size": sizes["patch_size"],
        "spatial_merge_size": tower.header.count("vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen_config(tower: TowerFile, vision: Config) -> Config:
    given = tower.text.get("rope.dimension_sections")
    sections = [] if given is None else np.asarray(given).tolist()[:3]
    rope = {**(tower.config.get("rope_scaling") or {}), "rope_type": "default"}
    return {
        "image_token_id": tower.find_token("<|image_pad|>", 151_655),
        "video_token_id": tower.find_token("<|video_pad|>", 151_656),
        "vision_start_token_id": tower.find_token("<|vision_start|>", 151_652),
        "vision_end_token_id": tower.find_token("<|vision_end|>", 151_653),
        "rope_scaling": rope | ({"mrope_section": sections} if sections else {}),
        "vision_config": vision,
    }


def _qwen2_vl_config(tower: TowerFile) -> Config:
    sizes = _qwen_sizes(tower)
    width = sizes.pop("hidden_size")
    ratio = sizes.pop("intermediate_size") / width
    return _qwen_config(tower, sizes | {"embed_dim": width, "mlp_ratio": ratio})


def _qwen2_5_vl_config(tower: TowerFile) -> Config:
    sizes, period = _qwen_sizes(tower), tower.vision("n_wa_pattern")
    window = tower.header.count("vision.window_size", 112)
    complete = list(range(period - 1, sizes["depth"], period))
    own = {"fullatt_block_indexes": complete, "window_size": window, "tokens_per_second": 2}
    return _qwen_config(tower, sizes | own)


def _qwen3_vl_config(tower: TowerFile) -> Config:
    flags = tower.header.get("vision.is_deepstack_layers", [])
    own = {
        "num_position_embeddings": tower.header.num_rows("v.position_embd.weight"),
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }
    if tower.config["model_type"].startswith("qwen3_5"):
        own.pop("deepstack_visual_indexes")
    return _qwen_config(tower, _qwen_sizes(tower) | own)


def _qwen_processor(tower: TowerFile) -> Config:
    side = tower.vision("patch_size") * tower.header.count("vision.spatial_merge_size", 2)
    fewest, most = QWEN_TOKENS
    return {"min_pixels": fewest * side**2, "max_pixels": most * side**2}


_QWEN_LAYER = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj"}
_QWEN_TOP = {
    "patch_embd": "visual.patch_embed.proj",
    "post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
QWEN2_VL = Projector(
    families={"qwen2": "qwen2_vl"},
    config=_qwen2_vl_config,
    processor=_qwen_processor,
    tensors=_QWEN_TOP,
    layer_tensors=_QWEN_LAYER | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    layer_prefix="visual.blocks",
    joined={"attn.qkv": ("attn_q", "attn_k", "attn_v")},
    has_frames=True,
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    families={"qwen2": "qwen2_5_vl"},
    config=_qwen2_5_vl_config,
    layer_tensors=_QWEN_LAYER
    | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
)
QWEN3_VL = replace(
    QWEN2_VL,
    families={
        "qwen3": "qwen3_vl",
        "qwen3_moe": "qwen3_vl_moe",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe_text": "qwen3_5_moe",
    },
    config=_qwen3_vl_config,
    tensors={
        "patch_embd": "visual.patch_embed.proj",
        "position_embd": "visual.pos_embed",
        "post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    },
    layer_tensors=_QWEN_LAYER
    | {"attn_qkv": "attn.qkv", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    joined={},
)

PROJECTORS: dict[str, Projector] = {
    "gemma3": GEMMA3,
    "gemma4v": GEMMA4,
    "idefics3": IDEFICS3,
    "internvl": INTERNVL,
    "pixtral": PIXTRAL,
    "qwen2a": QWEN2_AUDIO,
    "qwen2vl_merger": QWEN2_VL,
    "qwen2.5vl_merger": QWEN2_5_VL,
    "qwen3vl_merger": QWEN3_VL,
    "voxtral": VOXTRAL,
}
"""Mappings by `clip.projector_type`."""

DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
"""Stems of DeepStack's mergers, "v.deepstack.LAYER.STEM", which are numbered in safetensors."""


def pixel_statistics(header: Header) -> dict[str, Any]:
    """Returns the means and standard deviations of preprocessor_config.json."""
    found = {name: header.get(f"vision.{name}") for name in ("image_mean", "image_std")}
    return {
        name: [round(value, 8) for value in np.asarray(values).tolist()]
        for name, values in found.items()
        if values is not None and math.prod(np.shape(values)) == 3
    }
