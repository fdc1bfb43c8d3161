"""Mapping from Whisper's encoder in llama.cpp's mmproj files to Qwen2-Audio and Voxtral.

Source: llama.cpp's converter (`WhisperEncoderModel` and its subclasses).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoint.gguf.gguf_family import Config, Restored
from octavo.checkpoint.gguf.mmproj_projector import Projector, TowerFile

VECTOR = Restored(lambda shape: shape[:1], lambda rows: rows.reshape(-1))


def _encoder(tower: TowerFile, names: tuple[str, str, str, str]) -> Config:
    """Returns audio_config; `names` are its keys of width, layers, heads and MLP width."""
    header = tower.header
    stored = ("embedding_length", "block_count", "attention.head_count", "feed_forward_length")
    sizes = {name: header.count(f"audio.{own}") for name, own in zip(names, stored, strict=True)}
    return sizes | {
        "num_mel_bins": header.count("audio.num_mel_bins"),
        "max_source_positions": header.num_rows("a.position_embd.weight"),
    }


def _qwen2_audio_config(tower: TowerFile) -> Config:
    names = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")
    token_id = tower.find_token("<|AUDIO|>", 151_646)
    return {"audio_token_index": token_id, "audio_config": _encoder(tower, names)}


def _voxtral_config(tower: TowerFile) -> Config:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    token_id = tower.find_token("[AUDIO]", 24)
    return {"audio_token_id": token_id, "audio_config": _encoder(tower, names)}


QWEN2_AUDIO = Projector(
    families={"qwen2": "qwen2_audio"},
    has_text_type=True,
    config=_qwen2_audio_config,
    processor=lambda tower: {},
    tensors={
        "a.position_embd": "audio_tower.embed_positions",
        "a.conv1d.1": "audio_tower.conv1",
        "a.conv1d.2": "audio_tower.conv2",
        "a.post_ln": "audio_tower.layer_norm",
        "mm.a.fc": "multi_modal_projector.linear",
    },
    layer_tensors={},
    layer_prefix="",
    audio_layer_tensors={
        "ln1": "self_attn_layer_norm",
        "ln2": "final_layer_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ffn_up": "fc1",
        "ffn_down": "fc2",
    },
    audio_layer_prefix="audio_tower.layers",
    restored={f"audio_tower.conv{layer}.bias": VECTOR for layer in (1, 2)},
)
VOXTRAL = replace(
    QWEN2_AUDIO,
    families={"llama": "voxtral"},
    config=_voxtral_config,
    tensors={stem: name for stem, name in QWEN2_AUDIO.tensors.items() if stem != "mm.a.fc"}
    | {f"mm.a.mlp.{layer}": f"multi_modal_projector.linear_{layer}" for layer in (1, 2)},
)
