"""Random options of each decoder family's config, drawn from the fields of its transformers class.

Sizes are odd where they may be, heads are one or many, and every flag, activation and factor that a
class has may be another than its default. Knows no model; `tiny_models.py` builds them.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import transformers

from tests.support.tiny_details import DETAILS
from tests.support.tiny_shapes import SHAPES

SIZED_ELSEWHERE = (
    *("mamba", "mamba2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma3n_text"),
    *("gemma4_text", "glm4_moe_lite", "kimi_linear"),
)
"""Families whose heads' sizes depend on one another in ways of their own."""
NO_NUMBERS = frozenset(
    (
        *("use_cache", "is_decoder", "add_cross_attention", "output_router_logits"),
        *("is_encoder_decoder", "return_dict", "output_attentions", "output_hidden_states"),
        *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "tie_word_embeddings"),
        *("residual_in_fp32", "rescale_prenorm_residual", "reorder_and_upcast_attn"),
        *("scale_attention_softmax_in_fp32", "attention_softmax_in_fp32"),
    )
)
"""Flags that are drawn apart, change no number, or are refused by name."""
FIXED = {
    "gpt_oss": {"hidden_act"},
    "bamba": {"num_hidden_layers"},
    "phimoe": {"num_experts_per_tok"},
    "gemma3n_text": {"num_hidden_layers"},
    "gemma4_text": {"num_hidden_layers", "vocab_size", "enable_moe_block"},
    "deepseek_v2": {"norm_topk_prob", "mlp_bias"},
    "gemma": {"use_bidirectional_attention"},
    "gemma2": {"use_bidirectional_attention"},
    "gemma3_text": {"attn_logit_softcapping", "use_bidirectional_attention"},
    "bloom": {"apply_residual_connection_post_layernorm"},
    "mpt": {"no_bias"},
    "nemotron_h": {"attention_bias"},  # transformers ignores it
}
"""Options of which a family supports a single value, and rejects others by name."""
OWN_ROPES = (
    *("gemma3_text", "gemma3n_text", "gemma4_text", "olmo3", "ministral3", "phimoe"),
    "hunyuan_v1_moe",
)
"""Families whose ropes differ by layer or need keys of their own."""
FACTORS = ("multiplier", "scaling", "logit_scale", "softcapping")
"""Parts of the names of factors and caps."""
COUNTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), (3, 4, 6)),
    "n_routed_experts": (8, 12),
    "n_shared_experts": (1, 2, 3),
    "moe_num_shared_experts": (0, 1, 3),
    "first_k_dense_replace": (0, 1, 2, 5),
    "topk_group": (2, 4),
    "query_pre_attn_scalar": (10, 16, 77),
    **dict.fromkeys(("mamba_d_conv", "conv_L_cache"), (2, 3, 5)),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), (5, 16)),
}
"""Whole numbers that may be others than those of the tiny models."""
ACTIVATIONS = ("silu", "gelu", "relu", "gelu_pytorch_tanh", "gelu_new")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
)


def random_options(family: str, seed: int) -> dict[str, Any]:
    """Returns options of a family; transformers may still refuse them."""
    drawn = _Draw(family, random.Random(f"{family} {seed}"))
    drawn.heads()
    drawn.sizes()
    drawn.flags_and_factors()
    drawn.rope()
    for name in FIXED.get(family, ()):
        drawn.options.pop(name, None)
    return drawn.options


class _Draw:
    """Options as they are drawn."""

    def __init__(self, family: str, generator: random.Random) -> None:
        self.family = family
        self.random = generator
        self.given = {**SHAPES[family], **DETAILS.get(family, {})}
        kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
        self.types = {field.name: _named(field.type) for field in dataclasses.fields(kind)}
        self._own_names = dict(getattr(kind, "attribute_map", {}))
        self.options: dict[str, Any] = {}

    def heads(self) -> None:
        """Draws heads and the hidden size, and the heads' size where it is a field."""
        if self.family in SIZED_ELSEWHERE:
            return
        count, dim = self.random.choice((1, 3, 4, 5, 6, 7, 9)), self.random.choice((8, 10, 12, 16))
        hidden = count * dim
        latent = self.family.startswith("deepseek")
        if "head_dim" in self.types and not latent:
            self.options["head_dim"] = dim
            hidden = self.random.choice((hidden, 40, 50, 64, 90))
        self.options[self._name("num_attention_heads")] = count
        self.options[self._name("hidden_size")] = hidden
        divisors = [each for each in range(1, count + 1) if count % each == 0]
        kv_heads = count if latent else self.random.choice(divisors)
        for name in ("num_key_value_heads", "num_kv_heads"):
            if name in self.types:
                self.options[name] = kv_heads
        if self.family == "gptj":
            self.options["rotary_dim"] = self.random.choice((2, 4, 8))

    def sizes(self) -> None:
        widths = ("intermediate_size", "moe_intermediate_size", "shared_intermediate_size")
        for name in (*widths, "shared_expert_intermediate_size", "n_inner", "ffn_dim"):
            if name in self.given:
                self.options[name] = self.random.choice((17, 31, 50, 64, 75, 96))
        self.options["vocab_size"] = self.random.choice((129, 131, 257, 263, 320, 334))
        self.options["tie_word_embeddings"] = self.random.random() < 0.5
        by_layer = {"layer_types", "layers_block_type", "mlp_only_layers"} & self.given.keys()
        if "num_hidden_layers" in self.given and not by_layer:
            self.options["num_hidden_layers"] = self.random.choice((1, 2, 3, 5))
        if "sliding_window" in self.types:
            self.options["sliding_window"] = self.random.choice((3, 16, 17, 31))

    def flags_and_factors(self) -> None:
        for name, kind in self.types.items():
            if self.random.random() < 0.5:
                continue
            if kind in ("bool", "bool | None") and name not in NO_NUMBERS:
                self.options[name] = self.random.random() < 0.5
            elif kind in ("float", "float | None") and any(word in name for word in FACTORS):
                self.options[name] = self.random.choice((0.3, 0.7, 1.5, 2.5))
            elif name in COUNTS and name in self.given:
                self.options[name] = self.random.choice(COUNTS[name])
            elif name in ("hidden_act", "activation_function", "hidden_activation"):
                self.options[name] = self.random.choice(ACTIVATIONS)
            elif name == "num_experts_per_tok" and name in self.given:
                self.options[name] = self.random.choice((1, 2, 3))
            elif name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
                self.options[name] = self.random.choice((1e-3, 1e-5))

    def rope(self) -> None:
        is_free = "rope_parameters" in self.types and "rope_parameters" not in self.given
        if is_free and self.family not in OWN_ROPES:
            theta = self.random.choice((5000.0, 1e6))
            self.options["rope_parameters"] = self.random.choice(ROPES) | {"rope_theta": theta}
        if "partial_rotary_factor" in self.types and self.random.random() < 0.5:
            self.options["partial_rotary_factor"] = self.random.choice((0.5, 0.75, 1.0))

    def _name(self, usual: str) -> str:
        return usual if usual in self.types else self._own_names.get(usual, usual)


def _named(kind: object) -> str:
    """Returns a field's type as it is written."""
    return kind.__name__ if isinstance(kind, type) else str(kind)
