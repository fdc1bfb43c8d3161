"""GGUF headers of families with recurrent states or convolutions: Mamba, Jamba, Bamba, Granite 4,
Falcon-H1, Nemotron-H and LFM2.

`attention.head_count_kv` is 0 for layers without attention. Source: as in `gguf_families.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.gguf.gguf_experts import (
    CORRECTION,
    GRANITE_EXPERTS,
    LFM2_EXPERTS,
    experts_config,
    widths,
)
from octavo.checkpoint.gguf.gguf_family import (
    TOP,
    Config,
    Family,
    Header,
    Restored,
    base_config,
    halves,
    log_negative,
)

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MIXER = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
_MIXER_2 = {**_MIXER, "ssm_dt": "dt_bias", "ssm_norm": "norm"}


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape),)


_CONVOLUTION = Restored(lambda shape: (shape[0], 1, shape[1]) if len(shape) > 1 else shape)
_RESTORED = {
    "ssm_a": Restored(lambda shape: shape, log_negative),
    "ssm_conv1d": _CONVOLUTION,
}
_RESTORED_2 = {
    **_RESTORED,
    "ssm_a": Restored(_flat, log_negative),
    "ssm_d": Restored(_flat),
    "ssm_norm": Restored(_flat),
}
_PAIRS = {"attn_q": halves("num_attention_heads"), "attn_k": halves("num_key_value_heads")}
_WHOLE = frozenset({"ssm_a", "ssm_d"})
_WHOLE_2 = _WHOLE | {"ssm_dt"}


def _within(module: str, names: dict[str, str]) -> dict[str, str]:
    """Returns the names of a module's tensors."""
    return {stem: f"{module}.{name}" for stem, name in names.items()}


def mamba_config(header: Header) -> Config:
    return {
        "hidden_size": header.count("embedding_length"),
        "intermediate_size": header.count("ssm.inner_size"),
        "num_hidden_layers": header.num_blocks(),
        "max_position_embeddings": header.count("context_length"),
        "conv_kernel": header.count("ssm.conv_kernel"),
        "state_size": header.count("ssm.state_size"),
        "time_step_rank": header.count("ssm.time_step_rank"),
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon"),
        "use_bias": header.has("blk.0.ssm_in.bias"),
        "use_conv_bias": header.has("blk.0.ssm_conv1d.bias"),
    }


def mamba2_config(header: Header) -> Config:
    config = mamba_config(header)
    num_heads, inner = config.pop("time_step_rank"), config.pop("intermediate_size")
    return config | {
        "num_heads": num_heads,
        "head_dim": inner // num_heads,
        "n_groups": header.count("ssm.group_count"),
        "expand": inner / config["hidden_size"],
    }


def _hybrid_config(header: Header, *, experts: bool = False) -> tuple[Config, list[bool]]:
    """Returns the config of a hybrid family, and whether each layer has attention."""
    num_layers = header.num_blocks()
    counts = header.get("attention.head_count_kv")
    by_layer = np.broadcast_to(0 if counts is None else counts, num_layers).tolist()
    kv_heads = {count for count in by_layer if count}
    if len(kv_heads) > 1:
        raise UnsupportedModel(
            f"{header.file.path}: attention.head_count_kv is {by_layer}, expected the same"
            " number for all attention layers"
        )
    config = base_config(header, experts=experts, kv_heads=next(iter(kv_heads), 1))
    epsilon = header.get("attention.layer_norm_epsilon")  # Nemotron-H, whose norms subtract no mean
    config["rms_norm_eps"] = header.number("attention.layer_norm_rms_epsilon", epsilon)
    first = next((layer for layer, count in enumerate(by_layer) if count), 0)
    config["attention_bias"] = header.has(f"blk.{first}.attn_q.bias")
    return config, [bool(count) for count in by_layer]


def _mixer_config(header: Header, config: Config, attends: Sequence[bool]) -> Config:
    """Returns the sizes of Mamba's mixer under the keys of Jamba and Bamba."""
    first = next((layer for layer, attending in enumerate(attends) if not attending), 0)
    return {
        "mamba_d_conv": header.count("ssm.conv_kernel"),
        "mamba_d_state": header.count("ssm.state_size"),
        "mamba_expand": header.count("ssm.inner_size") / config["hidden_size"],
        "mamba_proj_bias": header.has(f"blk.{first}.ssm_in.bias"),
        "mamba_conv_bias": header.has(f"blk.{first}.ssm_conv1d.bias"),
    }


def _mixer2_config(header: Header, config: Config, attends: Sequence[bool]) -> Config:
    num_heads = header.count("ssm.time_step_rank")
    return _mixer_config(header, config, attends) | {
        "mamba_n_heads": num_heads,
        "mamba_d_head": header.count("ssm.inner_size") // num_heads,
        "mamba_n_groups": header.count("ssm.group_count"),
    }


def jamba_config(header: Header) -> Config:
    config, attends = _hybrid_config(header, experts=True)
    layers = range(len(attends))
    routed = [header.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in layers]
    return {
        **config,
        **_mixer_config(header, config, attends),
        **_period(header, "attn_layer", attends),
        **_period(header, "expert_layer", routed),
        "mamba_dt_rank": header.count("ssm.time_step_rank"),
        "num_experts": header.count("expert_count", 1) if any(routed) else 1,
        "num_experts_per_tok": header.count("expert_used_count", 1),
    }


def _period(header: Header, name: str, chosen: Sequence[bool]) -> Config:
    """Returns the period and the offset of the chosen layers."""
    layers = [layer for layer, is_chosen in enumerate(chosen) if is_chosen]
    offset = layers[0] if layers else len(chosen)
    period = layers[1] - offset if len(layers) > 1 else len(chosen) + 1
    if [layer % period == offset for layer in range(len(chosen))] != list(chosen):
        raise UnsupportedModel(
            f"{header.file.path}: the {name}s are {layers}, expected evenly spaced layers"
        )
    return {f"{name}_period": period, f"{name}_offset": offset}


def granite_hybrid_config(header: Header) -> Config:
    config, attends = _hybrid_config(header, experts=True)
    turns = bool(header.get("rope.scaling.finetuned", True))
    routed = header.number("expert_count", 0)
    width = header.get("expert_shared_feed_forward_length") or config["intermediate_size"]
    return {
        **config,
        **_mixer2_config(header, config, attends),
        "layer_types": ["attention" if attending else "mamba" for attending in attends],
        "position_embedding_type": "rope" if turns else "nope",
        "shared_intermediate_size": width,
        "num_local_experts": routed,
        "num_experts_per_tok": header.count("expert_used_count") if routed else 1,
        "separate_experts": True,
        "attention_multiplier": header.number("attention.scale", 1.0),
        "embedding_multiplier": header.number("embedding_scale", 1.0),
        "residual_multiplier": header.number("residual_scale", 1.0),
        "logits_scaling": header.number("logit_scale", 1.0),
    }


def bamba_config(header: Header) -> Config:
    config, attends = _hybrid_config(header)
    return {
        **config,
        **_mixer2_config(header, config, attends),
        "partial_rotary_factor": header.count("rope.dimension_count") / config["head_dim"],
        "attn_layer_indices": [layer for layer, attending in enumerate(attends) if attending],
    }


def falcon_h1_config(header: Header) -> Config:
    """Returns a config without multipliers; the converter multiplies them into the weights."""
    config, _ = _hybrid_config(header)
    return {
        **config,
        **_mixer2_config(header, config, (False,)),
        "mamba_d_ssm": header.count("ssm.inner_size"),
        "mamba_rms_norm": header.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
        "projectors_bias": header.has("blk.0.ssm_out.bias"),
    }


def nemotron_h_config(header: Header) -> Config:
    widths = np.broadcast_to(header.get("feed_forward_length", 0), header.num_blocks())
    config, attends = _hybrid_config(header, experts=True)
    layers = range(len(attends))
    recurs = [header.has(f"blk.{layer}.ssm_in.weight") for layer in layers]
    routed = [header.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in layers]
    kinds = [
        "mamba" if recurs[i] else "attention" if attends[i] else "moe" if routed[i] else "mlp"
        for i in layers
    ]
    mixer = _mixer2_config(header, config, [not each for each in recurs])
    made = {
        **config,
        "layers_block_type": kinds,
        "intermediate_size": int(widths.max()),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": mixer["mamba_n_heads"],
        "mamba_head_dim": mixer["mamba_d_head"],
        "n_groups": mixer["mamba_n_groups"],
        "ssm_state_size": mixer["mamba_d_state"],
        "conv_kernel": mixer["mamba_d_conv"],
        "use_bias": mixer["mamba_proj_bias"],
        "use_conv_bias": mixer["mamba_conv_bias"],
        "mlp_bias": any(header.has(f"blk.{layer}.ffn_up.bias") for layer in layers),
    }
    if not any(routed):
        return made
    return made | {
        "n_routed_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "n_shared_experts": header.count("expert_shared_count", 1),
        "moe_intermediate_size": header.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": header.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "routed_scaling_factor": float(header.number("expert_weights_scale", 1.0)),
        "n_group": header.count("expert_group_count", 1),
        "topk_group": header.count("expert_group_used_count", 1),
    }


def lfm2_config(header: Header, *, experts: bool = False) -> Config:
    config, attends = _hybrid_config(header, experts=experts)
    return {
        **config,
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": header.count("shortconv.l_cache"),
        "conv_bias": header.has(f"blk.{attends.index(False)}.shortconv.conv.bias"),
        "layer_types": ["full_attention" if attending else "conv" for attending in attends],
    }


def lfm2_moe_config(header: Header) -> Config:
    num_dense = header.number("leading_dense_block_count", 0)
    return {
        **lfm2_config(header, experts=True),
        **experts_config(header, normalize=True),
        **widths(header),
        "num_dense_layers": num_dense,
        "use_expert_bias": header.has(f"blk.{num_dense}.{CORRECTION}.bias"),
        "routed_scaling_factor": float(header.number("expert_weights_scale", 1.0)),
    }


_MAMBA = Family(
    "mamba",
    mamba_config,
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    {"attn_norm": "norm", **_within("mixer", _MIXER)},
    layer_prefix="backbone.layers",
    whole_names=_WHOLE,
    restored=_RESTORED,
)
_GRANITE_HYBRID = Family(
    "granitemoehybrid",
    granite_hybrid_config,
    TOP,
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.down_proj",
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.down_proj",
        **_ATTENTION,
        **GRANITE_EXPERTS,
        **_within("mamba", _MIXER_2),
    },
    row_orders=_PAIRS,
    whole_names=_WHOLE_2,
    restored=_RESTORED_2,
)
_FEED_FORWARD = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_BAMBA = replace(
    _GRANITE_HYBRID,
    model_type="bamba",
    config=bamba_config,
    tensors=TOP | {"output_norm": "model.final_layernorm"},
    layer_tensors={
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        **_FEED_FORWARD,
        **_ATTENTION,
        **_within("mamba", _MIXER_2),
    },
)
_NEMOTRON_H = Family(
    "nemotron_h",
    nemotron_h_config,
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        CORRECTION: "mixer.gate.e_score_correction_bias",
        **_within("mixer", _MIXER_2),
    },
    layer_prefix="backbone.layers",
    row_orders=_PAIRS,
    whole_names=_WHOLE_2 | {CORRECTION},
    restored=_RESTORED_2,
)

_LFM2 = Family(
    "lfm2",
    lfm2_config,
    {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",
        "output": "lm_head",
    },
    {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        **_ATTENTION,
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    restored={"conv": _CONVOLUTION},
)

STATE_FAMILIES: dict[str, Family] = {
    "mamba": _MAMBA,
    "mamba2": replace(
        _MAMBA,
        model_type="mamba2",
        config=mamba2_config,
        layer_tensors={"attn_norm": "norm", **_within("mixer", _MIXER_2)},
        whole_names=_WHOLE_2,
        restored=_RESTORED_2,
    ),
    "jamba": Family(
        "jamba",
        jamba_config,
        TOP | {"output_norm": "model.final_layernorm"},
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            **_FEED_FORWARD,
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
            "ffn_up_exps": "feed_forward.experts.{}.up_proj",
            "ffn_down_exps": "feed_forward.experts.{}.down_proj",
            **_ATTENTION,
            **_within("mamba", _MIXER),
            "ssm_dt_norm": "mamba.dt_layernorm",
            "ssm_b_norm": "mamba.b_layernorm",
            "ssm_c_norm": "mamba.c_layernorm",
        },
        whole_names=_WHOLE,
        restored=_RESTORED,
    ),
    "granitehybrid": replace(
        _GRANITE_HYBRID,
        variants=((lambda header: header.get("attention.scale") is None, _BAMBA),),
    ),
    "falcon-h1": Family(
        "falcon_h1",
        falcon_h1_config,
        TOP | {"output_norm": "model.final_layernorm"},
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm.weight",
            **_FEED_FORWARD,
            **_ATTENTION,
            **_within("mamba", _MIXER_2),
        },
        whole_names=_WHOLE_2 | {"ffn_norm"},
        restored=_RESTORED_2,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        config=lfm2_moe_config,
        layer_tensors=_LFM2.layer_tensors | LFM2_EXPERTS | {CORRECTION: "feed_forward.expert_bias"},
        whole_names=frozenset({CORRECTION}),
    ),
}
