"""GGUF headers of families with gated delta rules: Qwen3-Next and Qwen3.5.

Qwen3.5's files order value heads differently: first the first value head of every key head, then
the second ones. Source: as in `gguf_families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.gguf.gguf_experts import EXPERTS, SHARED_EXPERT, experts_config, widths
from octavo.checkpoint.gguf.gguf_family import (
    TOP,
    Config,
    Family,
    Header,
    Restored,
    RowOrder,
    log_negative,
    rms_config,
)

CONVOLUTION = Restored(lambda shape: (shape[0], 1, shape[1]))


def _delta_config(header: Header, *, experts: bool) -> Config:
    """Returns the sizes of attention and mixers, and the type of each layer."""
    # Files whose layers all have experts may lack a width of dense layers.
    is_dense = header.get("feed_forward_length") is not None
    mlp_widths = None if is_dense else [header.count("expert_feed_forward_length")]
    config = rms_config(header, experts=experts, widths=mlp_widths)
    predictors = header.number("nextn_predict_layers", 0)
    num_layers = config["num_hidden_layers"] - predictors
    attends = [header.has(f"blk.{layer}.attn_q.weight") for layer in range(num_layers)]
    first = next((layer for layer, attending in enumerate(attends) if attending), 0)
    num_value_heads = header.count("ssm.time_step_rank")
    return {
        **config,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "attention_bias": header.has(f"blk.{first}.attn_q.bias"),
        "linear_conv_kernel_dim": header.count("ssm.conv_kernel"),
        "linear_key_head_dim": header.count("ssm.state_size"),
        "linear_num_key_heads": header.count("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_value_head_dim": header.count("ssm.inner_size") // num_value_heads,
    }


def qwen3_next_config(header: Header) -> Config:
    config = _delta_config(header, experts=True)
    layers = range(config["num_hidden_layers"])
    return {
        **config,
        **widths(header),
        **experts_config(header, normalize=True),
        "separate_gates": any(header.has(f"blk.{i}.attn_gate.weight") for i in layers),
    }


def qwen3_5_config(header: Header) -> Config:
    return _delta_config(header, experts=False)


def qwen3_5_moe_config(header: Header) -> Config:
    experts = experts_config(header, normalize=True)
    return _delta_config(header, experts=True) | widths(header) | experts


def _by_key_head(width_key: str | None, keys_before: int = 0) -> RowOrder:
    """Returns the order that groups value heads by key head.

    A value head has `width_key` rows (1 if None). The rows of the keys, times `keys_before`, come
    first and keep their order.
    """

    def order(config: Mapping[str, Any], num_rows: int) -> NDArray[np.intp]:
        num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        first = keys_before * num_keys * config["linear_key_head_dim"]
        width = 1 if width_key is None else config[width_key]
        if num_values % num_keys or num_rows != first + num_values * width:
            raise WeightMismatch(
                f"got {num_rows} rows, expected {first + num_values * width} for {num_values}"
                f" value heads and {num_keys} key heads"
            )
        heads = first + np.arange(num_values * width).reshape(num_values // num_keys, num_keys, -1)
        return np.concatenate([np.arange(first), heads.swapaxes(0, 1).reshape(-1)])

    return order


_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DENSE = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NEXT = Family(
    "qwen3_next",
    qwen3_next_config,
    TOP,
    _LAYER
    | EXPERTS
    | SHARED_EXPERT
    | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    norm_offset=1.0,
    plain_norms=frozenset({"ssm_norm"}),
    whole_names=frozenset({"ssm_a", "ssm_dt"}),
    restored={
        "ssm_a": Restored(lambda shape: shape, log_negative),
        "ssm_conv1d": CONVOLUTION,
    },
)
_ONE_A_HEAD = _by_key_head(None)
_VALUES = _by_key_head("linear_value_head_dim")
_BEHIND_KEYS = _by_key_head("linear_value_head_dim", keys_before=2)

_QWEN3_5 = replace(
    _NEXT,
    model_type="qwen3_5_text",
    config=qwen3_5_config,
    layer_tensors=_LAYER
    | _DENSE
    | {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"},
    row_orders={
        "attn_qkv": _BEHIND_KEYS,
        "ssm_conv1d": _BEHIND_KEYS,
        "attn_gate": _VALUES,
        "ssm_beta": _ONE_A_HEAD,
        "ssm_alpha": _ONE_A_HEAD,
        "ssm_a": _ONE_A_HEAD,
        "ssm_dt": _ONE_A_HEAD,
    },
    column_orders={"ssm_out": _VALUES},
)

DELTA_FAMILIES: dict[str, Family] = {
    "qwen3next": _NEXT,
    "qwen35": _QWEN3_5,
    "qwen35moe": replace(
        _QWEN3_5,
        model_type="qwen3_5_moe_text",
        config=qwen3_5_moe_config,
        layer_tensors=_QWEN3_5.layer_tensors | EXPERTS | SHARED_EXPERT,
    ),
}
