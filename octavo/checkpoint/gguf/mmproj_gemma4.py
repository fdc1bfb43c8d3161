"""Mapping from the towers of Gemma 4 in llama.cpp's mmproj files to the Hugging Face family.

Source: llama.cpp's converter (`Gemma4VisionAudioModel`) and `tools/mtmd/clip.cpp` (defaults).
"""

from __future__ import annotations

import numpy as np

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.gguf.gguf_family import Config, Restored
from octavo.checkpoint.gguf.mmproj_projector import Projector, TowerFile

CELL = 3
"""Side of a cell in patches, unless the header says."""


def _gemma4_config(tower: TowerFile) -> Config:
    if not tower.config.get("hidden_size_per_layer_input"):
        raise UnsupportedModel(
            f"mmproj: {tower.header.file.path} is a tower of a larger Gemma 4 model, whose image"
            " tokens attend to one another, which is not supported",
            hint="images are read with Gemma 4 E2B and E4B",
        )
    sizes, shapes = tower.sizes(), tower.header.file.tensors
    head_dim = tower.header.num_rows("v.blk.0.attn_q_norm.weight")
    own: Config = {
        "image_token_id": tower.find_token("<|image|>", 258_880),
        "boi_token_id": tower.find_token("<|image>", 255_999),
        "eoi_token_id": tower.find_token("<image|>", 258_882),
        "video_token_id": tower.find_token("<|video|>", 258_884),
        "vision_config": sizes
        | {
            "num_key_value_heads": tower.header.num_rows("v.blk.0.attn_k.weight") // head_dim,
            "head_dim": head_dim,
            "pooling_kernel_size": tower.header.count("vision.projector.scale_factor", CELL),
            "position_embedding_size": shapes["v.position_embd.weight"].shape[1],
            "rms_norm_eps": tower.eps,
            "standardize": tower.header.has("v.std_bias"),
            "use_clipped_linears": tower.header.has("v.blk.0.attn_q.input_min"),
        },
    }
    own["vision_config"].pop("image_size")  # unused
    return own | (_audio_config(tower) if tower.header.get("has_audio_encoder") else {})


def _audio_config(tower: TowerFile) -> Config:
    header, shapes = tower.header, tower.header.file.tensors
    return {
        "audio_token_id": tower.find_token("<|audio|>", 258_881),
        "boa_token_id": tower.find_token("<|audio>", 256_000),
        "eoa_token_index": tower.find_token("<audio|>", 258_883),
        "audio_config": {
            "hidden_size": header.count("audio.embedding_length"),
            "num_hidden_layers": header.count("audio.block_count"),
            "num_attention_heads": header.count("audio.attention.head_count"),
            "subsampling_conv_channels": [
                header.num_rows(f"a.conv1d.{layer}.weight") for layer in (0, 1)
            ],
            "conv_kernel_size": shapes["a.blk.0.conv_dw.weight"].shape[1],
            "output_proj_dims": header.num_rows("a.pre_encode.out.weight"),
            "rms_norm_eps": float(header.number("audio.attention.layer_norm_epsilon", 1e-6)),
            "use_clipped_linears": header.has("a.blk.0.attn_q.input_min"),
        },
    }


def _flat_pixels(weight: np.ndarray) -> np.ndarray:
    """Returns the patch embedding `[W, colors, rows, columns]` with a pixel's colors side by
    side.
    """
    return weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)


GEMMA4 = Projector(
    families={"gemma4_text": "gemma4"},
    config=_gemma4_config,
    processor=lambda tower: {},
    tensors={
        "patch_embd": "vision_tower.patch_embedder.input_proj",
        "position_embd": "vision_tower.patch_embedder.position_embedding_table",
        "std_bias": "vision_tower.std_bias",
        "std_scale": "vision_tower.std_scale",
        "mm.input_projection": "embed_vision.embedding_projection",
        "mm.a.input_projection": "embed_audio.embedding_projection",
        "a.conv1d.0": "audio_tower.subsample_conv_projection.layer0.conv",
        "a.conv1d.0.norm": "audio_tower.subsample_conv_projection.layer0.norm",
        "a.conv1d.1": "audio_tower.subsample_conv_projection.layer1.conv",
        "a.conv1d.1.norm": "audio_tower.subsample_conv_projection.layer1.norm",
        "a.input_projection": "audio_tower.subsample_conv_projection.input_proj_linear",
        "a.pre_encode.out": "audio_tower.output_proj",
    },
    layer_tensors={
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "attn_q": "self_attn.q_proj.linear",
        "attn_k": "self_attn.k_proj.linear",
        "attn_v": "self_attn.v_proj.linear",
        "attn_out": "self_attn.o_proj.linear",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj.linear",
        "ffn_up": "mlp.up_proj.linear",
        "ffn_down": "mlp.down_proj.linear",
    },
    layer_prefix="vision_tower.encoder.layers",
    audio_layer_tensors={
        "ffn_norm": "feed_forward1.pre_layer_norm",
        "ffn_up": "feed_forward1.ffw_layer_1.linear",
        "ffn_down": "feed_forward1.ffw_layer_2.linear",
        "ffn_post_norm": "feed_forward1.post_layer_norm",
        "ffn_norm_1": "feed_forward2.pre_layer_norm",
        "ffn_up_1": "feed_forward2.ffw_layer_1.linear",
        "ffn_down_1": "feed_forward2.ffw_layer_2.linear",
        "ffn_post_norm_1": "feed_forward2.post_layer_norm",
        "attn_pre_norm": "norm_pre_attn",
        "attn_q": "self_attn.q_proj.linear",
        "attn_k": "self_attn.k_proj.linear",
        "attn_v": "self_attn.v_proj.linear",
        "attn_out": "self_attn.post.linear",
        "attn_k_rel": "self_attn.relative_k_proj",
        "per_dim_scale": "self_attn.per_dim_scale",
        "attn_post_norm": "norm_post_attn",
        "conv_norm": "lconv1d.pre_layer_norm",
        "conv_pw1": "lconv1d.linear_start.linear",
        "conv_dw": "lconv1d.depthwise_conv1d",
        "norm_conv": "lconv1d.conv_norm",
        "conv_pw2": "lconv1d.linear_end.linear",
        "ln2": "norm_out",
    },
    audio_layer_prefix="audio_tower.layers",
    whole_names=frozenset({"position_embd", "per_dim_scale"}),
    restored={
        "patch_embd": Restored(
            lambda shape: (shape[0], shape[1] * shape[2] * shape[3]), _flat_pixels
        ),
        "conv_dw": Restored(lambda shape: (shape[0], 1, shape[1]), lambda weight: weight[:, None]),
        # The file has softplus of these numbers.
        "per_dim_scale": Restored(
            lambda shape: shape, lambda scale: scale + np.log(-np.expm1(-scale))
        ),
    },
)
