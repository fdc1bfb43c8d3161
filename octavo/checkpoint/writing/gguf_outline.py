"""Builds the outline of a GGUF file for a checkpoint in another format: the header that llama.cpp's
converter would write, and the layout of all tensors without their bytes.

The keys are the inverse of `gguf_configs.py`. `wiring/gguf_outline.py` checks that the outline
reproduces the Program. Source: llama.cpp's `gguf-py/gguf/constants.py` and its converter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.gguf.gguf_families import FAMILIES
from octavo.checkpoint.gguf.gguf_family import YARN_KEYS, Family
from octavo.checkpoint.gguf.gguf_file import DEFAULT_ALIGNMENT, MAGIC
from octavo.checkpoint.ports import NORMAL, UNUSED, Checkpoint, Vocabulary
from octavo.checkpoint.writing.gguf_file import TYPE_NUMBERS, tensor_entry
from octavo.checkpoint.writing.gguf_keys import KeyValue, metadata_bytes
from octavo.quant.gguf import BLOCK_TYPES, BlockType

LLAMA_FAMILIES = {"mistral": "llama"}
"""Further families that an architecture can represent."""
NUMBERS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attention.scale": ("attention_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
}
"""Keys under the architecture's prefix, and the config keys from which their values may come."""
NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
FLOATS = {
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "residual_scale",
    "embedding_scale",
    "logit_scale",
}
ROUTER = "ffn_gate_inp"
USUAL_PERIOD = 6
"""Default period of layers with full attention."""
FLOAT_TYPES = ("F32", "F16", "BF16")
ROPE_FREQS = "rope_freqs.weight"
SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def find_architecture(model_type: str) -> str | None:
    """Returns the architecture whose files represent a family; None if there is none."""
    for name, family in FAMILIES.items():
        every = (family, *(variant for _, variant in family.variants))
        if any(one.model_type == model_type for one in every):
            return name
    return LLAMA_FAMILIES.get(model_type)


class GgufOutline:
    """The header and tensors of a checkpoint's GGUF file."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary | None,
        tokenizer_keys: Mapping[str, KeyValue],
    ) -> None:
        """Raises UnsupportedModel if no architecture represents the family."""
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        model_type = str(self._config.get("model_type"))
        architecture = find_architecture(model_type)
        if architecture is None:
            raise UnsupportedModel(
                f"format gguf: the family {model_type} has no supported GGUF architecture",
                hint="convert it with llama.cpp's convert_hf_to_gguf.py --outtype bf16 first",
            )
        self._architecture = architecture
        family = FAMILIES[architecture]
        every = (family, *(variant for _, variant in family.variants))
        self._family = next((one for one in every if one.model_type == model_type), family)
        if self._family.joined or self._family.column_orders or self._family.stacks:
            raise UnsupportedModel(
                f"format gguf: tensors of {model_type} have a different layout in GGUF",
                hint="convert it with llama.cpp's convert_hf_to_gguf.py --outtype bf16 first",
            )
        self._factors = self._llama3_factors()
        self.tensors = dict(self._tensors())
        self._keys = {
            "general.architecture": architecture,
            "general.name": checkpoint.path.name,
            "general.file_type": 0,
            **{f"{architecture}.{key}": value for key, value in self._model_keys().items()},
            **_vocabulary_keys(vocabulary, self._num_rows()),
            **(tokenizer_keys if vocabulary is not None else {}),
        }

    def write(self, path: Path) -> None:
        """Writes a sparse file with the header and holes in place of the tensors."""
        entries, start = [], 0
        for name, (shape, kind) in self.tensors.items():
            entries.append(tensor_entry(name, shape, TYPE_NUMBERS[kind.name], start))
            start += -(-kind.num_bytes(shape) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        counts = struct.pack("<IQQ", 3, len(entries), len(self._keys))
        header = MAGIC + counts + metadata_bytes(self._keys) + b"".join(entries)
        data = -(-len(header) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        with path.open("wb") as file:
            file.write(header)
            file.truncate(data + start)
            if self._factors is not None:
                file.seek(data + self._get_start(ROPE_FREQS))
                file.write(self._factors.tobytes())

    def _get_start(self, wanted: str) -> int:
        start = 0
        for name, (shape, kind) in self.tensors.items():
            if name == wanted:
                return start
            start += -(-kind.num_bytes(shape) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        raise KeyError(wanted)

    def _num_rows(self) -> int:
        return self.tensors["token_embd.weight"][0][0]

    # -- keys ----------------------------------------------------------------------------------

    def _model_keys(self) -> dict[str, KeyValue]:
        keys: dict[str, KeyValue] = {}
        for key, names in NUMBERS.items():
            value = next((self._config[name] for name in names if self._config.get(name)), None)
            if value is not None and not isinstance(value, bool):
                keys[key] = float(value) if key in FLOATS else int(value)
        missing = [key for key in NEEDED if key not in keys]
        if missing:
            raise UnsupportedModel(
                f"format gguf: config.json has no value for {', '.join(missing)}",
                hint="convert it with llama.cpp's convert_hf_to_gguf.py --outtype bf16 first",
            )
        heads = int(self._config["num_attention_heads"])
        width = int(self._config.get("head_dim") or self._config["hidden_size"] // heads)
        rope = self._rope()
        share = float(
            rope.get("partial_rotary_factor", self._config.get("partial_rotary_factor", 1))
        )
        keys |= {
            "attention.key_length": width,
            "attention.value_length": width,
            "rope.dimension_count": int(width * share),
            "rope.freq_base": float(rope.get("rope_theta", self._config.get("rope_theta", 1e4))),
            "vocab_size": self._num_rows(),
        }
        return keys | self._windows() | self._rope_scaling(rope)

    def _windows(self) -> dict[str, KeyValue]:
        """Returns the layers' sliding windows; empty if no layer has a window, or all layers except
        every sixth have one.
        """
        types = self._config.get("layer_types") or []
        flags = [kind == "sliding_attention" for kind in types]
        usual = [bool((layer + 1) % USUAL_PERIOD) for layer in range(len(flags))]
        if not any(flags) or flags == usual:
            return {}
        return {"attention.sliding_window_pattern": np.array(flags, np.bool_)}

    def _rope(self) -> Mapping[str, Any]:
        """Returns the RoPE parameters; if layers differ, the parameters of full attention."""
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        nested = rope.get("full_attention")
        return nested if isinstance(nested, dict) else rope

    def _rope_scaling(self, rope: Mapping[str, Any]) -> dict[str, KeyValue]:
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if kind not in ("linear", "yarn"):
            return {}
        keys: dict[str, KeyValue] = {
            "rope.scaling.type": kind,
            "rope.scaling.factor": float(rope["factor"]),
        }
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings")
            keys["rope.scaling.original_context_length"] = int(
                original or self._config["max_position_embeddings"]
            )
            for name, key in YARN_KEYS.items():
                if rope.get(name) is not None:
                    keys[f"rope.scaling.{key}"] = float(rope[name])
        return keys

    def _llama3_factors(self) -> NDArray[np.float32] | None:
        """Returns the divisor of each frequency for Llama 3's rope; None for other ropes."""
        rope = self._rope()
        if (rope.get("rope_type") or rope.get("type")) != "llama3":
            return None
        heads = int(self._config["num_attention_heads"])
        width = int(self._config.get("head_dim") or self._config["hidden_size"] // heads)
        theta = float(rope.get("rope_theta", self._config.get("rope_theta", 1e4)))
        factor, low, high, length = (
            float(rope[name])
            for name in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            )
        )
        factors = []
        for i in range(0, width, 2):
            wavelength = 2 * math.pi * theta ** (i / width)
            if wavelength < length / high:
                factors.append(1.0)
            elif wavelength > length / low:
                factors.append(factor)
            else:
                smooth = (length / wavelength - low) / (high - low)
                factors.append(1 / ((1 - smooth) / factor + smooth))
        return np.array(factors, np.float32)

    # -- tensors -------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, tuple[tuple[int, ...], BlockType]]]:
        """Yields each tensor's name, shape and type: matrices in their stored type, all others in
        fp32.
        """
        if self._factors is not None:
            yield ROPE_FREQS, (self._factors.shape, BLOCK_TYPES[TYPE_NUMBERS["F32"]])
        for name in _names(self._family, int(self._config.get("num_hidden_layers") or 0)):
            own = self._family.name(name)
            assert own is not None
            if name.startswith("output.") and self._config.get("tie_word_embeddings"):
                continue
            first = own.format(0)
            try:
                shape = tuple(self._checkpoint.stored(first).shape)
            except WeightMismatch:
                continue
            if own != first:
                shape = (self._num_experts(own), *shape)
            kept = self._checkpoint.get_format(first)
            is_plain = len(shape) < 2 or ROUTER in name or kept not in FLOAT_TYPES
            yield name, (shape, BLOCK_TYPES[TYPE_NUMBERS["F32" if is_plain else kept]])

    def _num_experts(self, name: str) -> int:
        count = 0
        while True:
            try:
                self._checkpoint.stored(name.format(count))
            except WeightMismatch:
                return count
            count += 1


def _names(family: Family, num_layers: int) -> Iterator[str]:
    """Yields the tensor names that a family's file may have."""
    for stem in family.tensors:
        yield from _with_suffixes(family, stem, stem)
    for layer in range(num_layers):
        for stem in family.layer_tensors:
            yield from _with_suffixes(family, stem, f"blk.{layer}.{stem}")


def _with_suffixes(family: Family, stem: str, name: str) -> Collection[str]:
    return (name,) if stem in family.whole_names else (f"{name}.weight", f"{name}.bias")


def _vocabulary_keys(vocabulary: Vocabulary | None, num_rows: int) -> dict[str, KeyValue]:
    if vocabulary is None:
        return {}
    missing = range(len(vocabulary.tokens), num_rows)
    types = vocabulary.types or [NORMAL] * len(vocabulary.tokens)
    keys: dict[str, KeyValue] = {
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": vocabulary.pre or "default",
        "tokenizer.ggml.tokens": [*vocabulary.tokens, *(b"[PAD%d]" % i for i in missing)],
        "tokenizer.ggml.token_type": np.array([*types, *(UNUSED for _ in missing)], np.int32),
    }
    if vocabulary.merges:
        keys["tokenizer.ggml.merges"] = list(vocabulary.merges)
    if vocabulary.scores:
        low = min(vocabulary.scores) - 1
        keys["tokenizer.ggml.scores"] = np.array(
            [*vocabulary.scores, *(low for _ in missing)], np.float32
        )
    if vocabulary.model == "llama":
        keys["tokenizer.ggml.add_space_prefix"] = vocabulary.add_space_prefix
    return keys
