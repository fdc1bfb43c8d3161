"""Base classes of the mapping from GGUF to Hugging Face: typed access to headers, names, orders of
rows.

Does not parse files (`gguf_file.py`) and reads only the tensors of rope factors; the families are
in `gguf_families.py`. Source: llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.gguf.gguf_file import GgufFile

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside the layers, for Llama and its relatives: name in the file, and in the checkpoint.
"""
YARN_KEYS = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
    "mscale": "yarn_log_multiplier",
    "mscale_all_dim": "yarn_log_multiplier",
}
"""Config keys of YaRN, and their keys in a header. A header has one number for mscale and
mscale_all_dim, and only if they are equal.
"""

NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.value_scale": (0.0, 1.0),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}
"""Keys that change a model's results, and the values that have no effect."""

Config = dict[str, Any]
Affixes = Literal["", "around", "behind"]
RowOrder = Callable[[Mapping[str, Any], int], NDArray[np.intp]]
"""Returns, for each row (or input) of the safetensors weight, its index in the file, given the
config and the number of rows.
"""


class Header:
    """Access to a header's keys under the architecture's prefix; errors name the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Any = None) -> Any:
        """Returns a number; a list per layer is accepted if all its values are equal."""
        value = self.get(key, default)
        name = f"{self.architecture}.{key}"
        if value is None:
            raise WeightMismatch(f"{self.file.path}: the header lacks {name}")
        if isinstance(value, np.ndarray):
            different = np.unique(value)
            if len(different) != 1:
                raise UnsupportedModel(
                    f"{self.file.path}: {name} differs between layers, which is not supported"
                )
            value = different[0].item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightMismatch(f"{self.file.path}: {name} is {value!r}, expected a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise WeightMismatch(
                f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected an"
                " integer of at least 1"
            )
        return value

    def refuse_unread(self) -> None:
        """Raises UnsupportedModel for a value that changes results and was not read."""
        for key, neutral in NEUTRAL.items():
            value = self.file.metadata.get(f"{self.architecture}.{key}")
            if key in self._asked or value is None:
                continue
            if not np.isin(value, neutral).all():
                raise UnsupportedModel(
                    f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected"
                    f" {' or '.join(map(str, neutral))} for this architecture"
                )

    def num_rows(self, tensor: str) -> int:
        """Returns the number of rows of a required tensor."""
        if tensor not in self.file.tensors:
            raise WeightMismatch(f"{self.file.path}: the tensor {tensor} is missing")
        return self.file.tensors[tensor].shape[0]

    def has(self, *names: str) -> bool:
        """Returns whether the file has all of these tensors."""
        return all(name in self.file.tensors for name in names)

    def num_blocks(self, stack: str = "blk", key: str = "block_count") -> int:
        """Returns the number of layers; raises WeightMismatch if the file has tensors of a
        different number.
        """
        stated = self.count(key)
        names = (name for name in self.file.tensors if name.startswith(f"{stack}."))
        count = len({name.removeprefix(f"{stack}.").split(".")[0] for name in names})
        if stated != count:
            raise WeightMismatch(
                f"{self.file.path}: {self.architecture}.{key} is {stated}, but the file has"
                f" the tensors of {count} layers"
            )
        return stated


class Restored(NamedTuple):
    """Inverse of a conversion that the converter applied to a tensor."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Computes the shape in safetensors from the shape in the file."""
    numbers: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda numbers: numbers


class Joined(NamedTuple):
    """A safetensors tensor that the converter split."""

    stems: tuple[str, ...]
    """Stems of the parts in the file."""
    shape: Callable[..., tuple[int, ...]]
    """Computes the shape in safetensors from the shapes of the parts."""
    numbers: Callable[..., NDArray]


@dataclass(frozen=True, slots=True)
class Family:
    """The mapping from a GGUF architecture to a Hugging Face checkpoint.

    `tensors` and `layer_tensors` map the stems of GGUF names ("output_norm", "attn_q" of
    "blk.N.attn_q") to safetensors names. `row_orders` and `column_orders` give the order of rows or
    inputs that differ from safetensors. `norm_offset` is the number that the converter added to the
    weights of all norms except `plain_norms`. `whole_names` are stems without ".weight" or ".bias",
    `restored` are tensors whose shape or values the converter changed, `joined` are tensors that it
    split. `stacks` are the prefixes of layers if a model has several stacks. `affixes` is the
    position of special tokens around a text. `variants` are other families with the same
    architecture, each with a test for its files.
    """

    model_type: str
    config: Callable[[Header], Config]
    tensors: dict[str, str]
    layer_tensors: dict[str, str]
    layer_prefix: str = "model.layers"
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    column_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    norm_offset: float = 0.0
    plain_norms: frozenset[str] = frozenset()
    whole_names: frozenset[str] = frozenset()
    restored: Mapping[str, Restored] = field(default_factory=dict)
    joined: Mapping[str, Joined] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    affixes: Affixes = ""
    variants: tuple[tuple[Callable[[Header], bool], Family], ...] = ()

    def of(self, header: Header) -> Family:
        """Returns the variant that matches the file, or this family."""
        return next((family for is_it, family in self.variants if is_it(header)), self)

    def joined_name(self, gguf_name: str) -> str | None:
        """Returns the name of the split tensor that this one is a part of; None if it is not."""
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
        for name, joined in self.joined.items():
            if layer and layer[2] in joined.stems:
                return f"{self.layer_prefix}.{layer[1]}.{name}"
        return None

    def name(self, gguf_name: str) -> str | None:
        """Returns the safetensors name; None if the family has no such tensor."""
        stem, _, suffix = gguf_name.rpartition(".")
        if suffix in self.whole_names:
            stem = gguf_name
        layer = re.fullmatch(r"((?:enc\.|dec\.)?)blk\.(\d+)\.(\w+(?:\.\w+)?)", stem)
        if layer:
            known = self.layer_tensors.get(layer[1] + layer[3])
            prefix = self.stacks.get(layer[1], self.layer_prefix)
            name = known and f"{prefix}.{layer[2]}.{known}"
            return name if name is None or layer[3] in self.whole_names else f"{name}.{suffix}"
        known = self.tensors.get(stem)
        return known and f"{known}.{suffix}"


def log_negative(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns log(-x): files store a state's rates as -exp(rate)."""
    logs: NDArray[np.float32] = np.log(-numbers)
    return logs


def halves(heads_key: str) -> RowOrder:
    """Returns the order that undoes interleaved rotary pairs: rows (2i, 2i + 1) of a head move to
    (i, i + D/2).
    """

    def order(config: Mapping[str, Any], num_rows: int) -> NDArray[np.intp]:
        pairs = _split_heads(num_rows, 2 * config[heads_key])
        return pairs.reshape(config[heads_key], -1, 2).swapaxes(1, 2).reshape(-1)

    return order


def by_head(config: Mapping[str, Any], num_rows: int) -> NDArray[np.intp]:
    """Returns the order that interleaves q, k and v by head; the file has all of q, then k,
    then v.
    """
    heads = config["num_attention_heads"]
    return _split_heads(num_rows, 3 * heads).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)


def by_kv_head(config: Mapping[str, Any], num_rows: int) -> NDArray[np.intp]:
    """Returns the order that puts the queries of each kv head before its k and v; the file has all
    of q, then k, then v.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_kv_heads"]
    rows = _split_heads(num_rows, heads + 2 * kv_heads).reshape(heads + 2 * kv_heads, -1)
    q = rows[:heads].reshape(kv_heads, heads // kv_heads, -1)
    k, v = rows[heads : heads + kv_heads, None], rows[heads + kv_heads :, None]
    return np.concatenate([q, k, v], axis=1).reshape(-1)


def _split_heads(num_rows: int, heads: int) -> NDArray[np.intp]:
    if num_rows % heads:
        raise WeightMismatch(f"got {num_rows} rows, expected a multiple of {heads} heads")
    return np.arange(num_rows)


def base_config(
    header: Header,
    *,
    experts: bool = False,
    kv_heads: int | None = None,
    widths: list[int] | None = None,
) -> Config:
    """Returns the config of a family with rotary positions and grouped heads.

    `experts` adds the keys of routed experts. `kv_heads` and the MLPs' `widths` are for headers
    with a number per layer.
    """
    heads = header.count("attention.head_count")
    hidden = header.count("embedding_length")
    head_dim = header.count("attention.key_length", hidden // heads)
    config = {
        "hidden_size": hidden,
        "intermediate_size": widths or _feed_forward_width(header),
        "num_hidden_layers": header.num_blocks(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or header.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": float(header.number("rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(header),
        "max_position_embeddings": header.count("context_length"),
        "hidden_act": "silu",
    }
    rotary_dim = header.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if header.number("expert_count", 0) and not experts:
        raise UnsupportedModel(
            f"{header.file.path}: {header.architecture} with experts is not supported from GGUF",
            hint="use the safetensors version of the model",
        )
    return config


def rope_scaling(header: Header) -> Config | None:
    """Returns `rope_scaling`.

    Llama 3's frequency factors, a tensor in GGUF, become an equivalent longrope with one list of
    factors. A factor without a type is linear, as in llama.cpp.
    """
    kind = header.get("rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModel(
            f"{header.file.path}: rope.scaling.type is {kind!r}, supported in GGUF: none, linear,"
            " yarn and longrope"
        )
    factor = 1.0 if kind == "none" else _rope_factor(header)
    if "rope_freqs.weight" in header.file.tensors:
        factors = (header.file.tensor("rope_freqs.weight").dequantize() * factor).tolist()
        length = header.count("context_length")
        both = {"short_factor": factors, "long_factor": factors}
        return {
            "rope_type": "longrope",
            **both,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if header.has("rope_factors_long.weight", "rope_factors_short.weight"):
        return _longrope(header, factor)
    if kind != "yarn":
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    original = header.count("rope.scaling.original_context_length", header.count("context_length"))
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        **{name: header.get(f"rope.scaling.{key}") for name, key in YARN_KEYS.items()},
    }


def _rope_factor(header: Header) -> float:
    """Returns the divisor of positions under its current or old key; 1 if it is missing or 0."""
    factor = header.number("rope.scaling.factor", header.get("rope.scale_linear", 0.0))
    return float(factor) or 1.0


def _longrope(header: Header, factor: float) -> Config:
    """Returns Phi-3's scaling; its two lists of factors are tensors."""
    short, long = (
        (header.file.tensor(f"rope_factors_{length}.weight").dequantize() * factor).tolist()
        for length in ("short", "long")
    )
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": float(header.number("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": header.count("rope.scaling.original_context_length"),
    }


def _feed_forward_width(header: Header) -> int:
    """Returns the width of the MLPs; layers without one are ignored."""
    widths = header.get("feed_forward_length")
    if isinstance(widths, np.ndarray) and len({*widths.tolist()} - {0}) == 1:
        return int(widths.max())
    return header.count("feed_forward_length")


def rms_config(
    header: Header,
    *,
    experts: bool = False,
    kv_heads: int | None = None,
    widths: list[int] | None = None,
) -> Config:
    """Returns the config of a family with RMS norms."""
    return base_config(header, experts=experts, kv_heads=kv_heads, widths=widths) | {
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }


def layer_norm_config(header: Header, eps_name: str = "layer_norm_eps") -> Config:
    """Returns the config of a family with LayerNorms; `eps_name` is its key of the epsilon."""
    return base_config(header) | {
        eps_name: header.number("attention.layer_norm_epsilon"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }


def windows_by_pattern(header: Header, period: int) -> Config:
    """Returns the layer types; without a pattern in the header, every `period`-th layer has full
    attention.
    """
    num_layers = header.num_blocks()
    flags = header.get("attention.sliding_window_pattern")
    if isinstance(flags, np.ndarray):
        windowed = [bool(flag) for flag in flags]
    else:
        period = header.count("attention.sliding_window_pattern", period)
        windowed = [bool((layer + 1) % period) for layer in range(num_layers)]
    return {
        "sliding_window": header.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in windowed],
    }
