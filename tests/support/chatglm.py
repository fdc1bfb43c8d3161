"""A tiny ChatGLM3 made of a tiny GLM-4's weights under ChatGLM's own names: transformers has no
ChatGLM, and the two compute the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.tiny_models import TinyModel


def chatglm_config(glm: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json that ChatGLM3's own code would have for a GLM-4's config."""
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": glm["vocab_size"],
        "vocab_size": glm["vocab_size"],
        "hidden_size": glm["hidden_size"],
        "ffn_hidden_size": glm["intermediate_size"],
        "num_layers": glm["num_hidden_layers"],
        "num_attention_heads": glm["num_attention_heads"],
        "kv_channels": glm["head_dim"],
        "multi_query_attention": True,
        "multi_query_group_num": glm["num_key_value_heads"],
        "layernorm_epsilon": glm["rms_norm_eps"],
        "rmsnorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "seq_length": glm["max_position_embeddings"],
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }


def save_as_chatglm(glm: TinyModel, folder: Path) -> None:
    """Writes config.json and model.safetensors of the same model."""
    tensors = glm.model.state_dict()
    named = {
        "transformer.embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": tensors["model.norm.weight"],
        "transformer.output_layer.weight": tensors["lm_head.weight"],
    }
    for i in range(glm.config["num_hidden_layers"]):
        old, new = f"model.layers.{i}", f"transformer.encoder.layers.{i}"
        for kind in ("weight", "bias"):
            parts = [tensors[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            named[f"{new}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
        for name, its_name in (
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            named[f"{new}.{its_name}.weight"] = tensors[f"{old}.{name}.weight"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(chatglm_config(glm.config)))
    save_file(
        {name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors"
    )
