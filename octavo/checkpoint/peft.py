"""Reads adapters saved by PEFT: adapter_config.json and adapter_model.safetensors.

Returns the matrices and scale of each module, and a digest. Unknown keys and tensors are rejected
by name: a partly loaded adapter would silently give wrong results. Source: huggingface/peft,
`LoraConfig` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import re2
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch, shown
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.safetensors import read_tensors

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

MERGE_HINT = "merge the adapter into the model with PEFT: merge_and_unload()"

MAX_ALPHA = 1e6
MAX_PATTERNS = 4096
MAX_PATTERN = 512
"""Maximum length of a module name pattern, in characters."""
MAX_CONFIG_BYTES = 1 << 20

WITHOUT_EFFECT = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias"),
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform"),
    *("auto_mapping", "fan_in_fan_out", "inference_mode", "lora_bias", "lora_dropout"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_config", "megatron_core", "runtime_config", "velora_config"),
    *("ensure_weight_tying", "qalora_group_size"),
}
"""Config keys that are read here or only describe the training."""

CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model's weights."""

KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?:base_layer\.)?(?P<part>"
    r"lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?"
    r"|weight|bias)"
)
"""A tensor's name: module and part. `weight` and `bias` belong to the base model."""

OUTER = re.compile(
    r"^(?:model\.language_model\.|language_model\.)?(?:model\.|transformer\.|backbone\.)?"
)
OTHER_NAMES = {"embed_out": "lm_head"}
"""Module names of earlier releases of transformers, and their current names."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleUpdate:
    """An adapter's update of a module: y = gain * (W x + scale * B (A x)) + bias."""

    module: str
    """Module name, as returned by `get_bare_name`."""
    scale: float = 0.0
    a: NDArray | None = None
    """A `[r, in]`, or `[r, V]` for an embedding table; float32 or bfloat16."""
    b: NDArray | None = None
    """B `[out, r]`."""
    is_table: bool = False
    magnitude: NDArray[np.float32] | None = None
    """Norms of the output rows `[out]` (DoRA): gain = magnitude / norm(W + scale * B A)."""
    bias: NDArray[np.float32] | None = None
    """Biases that replace the base model's biases, `[out]`."""
    added_bias: NDArray[np.float32] | None = None
    """Biases of B, times the scale, `[out]`."""
    base: NDArray | None = None
    """The base model's matrix, if it was saved with the adapter."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    path: Path
    digest: bytes
    """Digest of all weights and scales, 32 bytes."""
    updates: Mapping[str, ModuleUpdate]
    """Updates by the bare name of their module."""


def get_bare_name(module: str) -> str:
    """Returns a module's name without the prefixes of the text model."""
    name = OUTER.sub("", module, count=1)
    return OTHER_NAMES.get(name, name)


def read_peft(path: Path, *, max_rank: int, max_bytes: int) -> PeftAdapter:
    """Reads an adapter's directory.

    Raises WeightMismatch if it is damaged or inconsistent, UnsupportedModel for unknown keys or
    tensors.
    """
    if not (path / CONFIG).is_file() or not (path / TENSORS).is_file():
        raise WeightMismatch(
            f"{path}: not an adapter: expected {CONFIG} and {TENSORS}",
            hint="save the adapter as safetensors with PEFT's save_pretrained",
        )
    _check_size(path / CONFIG, MAX_CONFIG_BYTES)
    config = _Config(path / CONFIG, read_json(path / CONFIG), max_rank)
    _check_size(path / TENSORS, max_bytes)
    modules: dict[str, _Module] = {}
    for name, array in read_tensors(path / TENSORS).items():
        full_name, part = _named(name, path)
        module = modules.setdefault(get_bare_name(full_name), _Module(full_name))
        if part in module.parts:
            raise WeightMismatch(
                f"{path}: got two tensors for {part} of {full_name}, expected one ({name})"
            )
        module.parts[part] = _numbers(array, name, path)
    updates = {name: _update(name, module, config, path) for name, module in modules.items()}
    return PeftAdapter(path, _digest(updates.values()), updates)


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of a module by part."""

    full_name: str
    """Name matched against the config's patterns."""
    parts: dict[str, NDArray] = field(default_factory=dict)


def _check_size(file: Path, max_bytes: int) -> None:
    size = file.stat().st_size
    if size > max_bytes:
        raise WeightMismatch(
            f"{file}: got {size:,} bytes, expected at most {max_bytes:,} for an adapter of this"
            " model",
            hint="if its rank is higher, raise max_lora_rank",
        )


def _named(name: str, path: Path) -> tuple[str, str]:
    """Returns the full module name of a tensor, and its part."""
    match = KEY.fullmatch(name)
    saved = ".modules_to_save." in name or ".token_adapter." in name
    is_base = match is not None and match["part"] == "weight" and ".base_layer." not in name
    if match is None or saved or is_base:
        raise UnsupportedModel(
            f"{path}: the tensor {name} is not part of a supported LoRA",
            hint="merge fully trained modules (modules_to_save) and trained tokens into the base"
            " model",
        )
    part = match["part"].removesuffix(".weight") if match["part"] != "weight" else "base"
    return match["module"], part


def _numbers(array: NDArray, name: str, path: Path) -> NDArray:
    if array.dtype.name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(
            f"{path}: {name} has the type {array.dtype.name}, expected float32, bfloat16, float16",
            hint=MERGE_HINT,
        )
    numbers = array.astype(np.float32) if array.dtype == np.float16 else array
    if not np.isfinite(numbers.astype(np.float32, copy=False)).all():
        raise WeightMismatch(
            f"{path}: {name} contains NaN or infinite values", hint="train the adapter again"
        )
    return numbers


class _Config:
    """An adapter's config: ranks and scales by module."""

    def __init__(self, file: Path, values: Mapping[str, Any], max_rank: int) -> None:
        self.file = file
        _check_keys(file, values)
        self._by_root = _flag(file, values, "use_rslora")
        self.use_dora = _flag(file, values, "use_dora")
        self._rank = _rank(file, "r", values.get("r"), max_rank)
        self._alpha = _alpha(file, "lora_alpha", values.get("lora_alpha"))
        self._ranks = _patterns(
            file, values, "rank_pattern", lambda what, value: _rank(file, what, value, max_rank)
        )
        self._alphas = _patterns(
            file, values, "alpha_pattern", lambda what, value: _alpha(file, what, value)
        )

    def get_rank(self, full_name: str) -> int:
        return int(_matching(self._ranks, full_name, self._rank))

    def get_scale(self, full_name: str) -> float:
        rank, alpha = self.get_rank(full_name), _matching(self._alphas, full_name, self._alpha)
        return alpha / (math.sqrt(rank) if self._by_root else rank)


def _check_keys(file: Path, values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise UnsupportedModel(
            f"{file}: peft_type is {shown(values.get('peft_type'))}, supported: LORA",
            hint=MERGE_HINT,
        )
    unknown = [key for key, value in values.items() if value and key not in WITHOUT_EFFECT]
    if unknown:
        raise UnsupportedModel(
            f"{file}: {unknown[0]} is {shown(values[unknown[0]])}, which is not supported",
            hint="merge its weights into the base model, or remove it",
        )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASES):
        raise UnsupportedModel(
            f"{file}: init_lora_weights is {shown(start)}, which changes the base model's weights",
            hint="convert it to a plain LoRA: save_pretrained with"
            " path_initial_model_for_weight_conversion",
        )
    if values.get("bias", "none") not in ("none", "all", "lora_only"):
        raise UnsupportedModel(
            f"{file}: bias is {shown(values['bias'])}, expected none, all, lora_only",
            hint=MERGE_HINT,
        )


def _flag(file: Path, values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise WeightMismatch(f"{file}: {key} is {shown(value)}, expected true or false")
    return bool(value)


def _rank(file: Path, what: str, value: Any, max_rank: int) -> float:
    if type(value) is not int or not 1 <= value <= max_rank:
        raise WeightMismatch(
            f"{file}: {what} is {shown(value)}, expected integers from 1 to {max_rank}",
            hint="max_lora_rank sets the highest" if type(value) is int and value > 0 else None,
        )
    return value


def _alpha(file: Path, what: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_ALPHA:
        raise WeightMismatch(
            f"{file}: {what} is {shown(value)}, expected numbers up to {MAX_ALPHA:,.0f}"
        )
    return float(value)


Patterns = list[tuple[Any, float]]


def _patterns(
    file: Path, values: Mapping[str, Any], key: str, check: Callable[[str, Any], float]
) -> Patterns:
    """Compiles patterns of module names; RE2 matches in linear time."""
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise WeightMismatch(
            f"{file}: {key}: got {shown(patterns)}, expected an object with at most {MAX_PATTERNS}"
            " patterns"
        )
    options = re2.Options()
    options.log_errors = False
    compiled: Patterns = []
    for pattern, value in patterns.items():
        number = check(f"{key}[{shown(pattern)}]", value)
        try:
            if len(pattern) > MAX_PATTERN:
                raise re2.error("too long")
            compiled.append((re2.compile(rf"(?:.*\.)?(?:{pattern})", options), number))
        except re2.error as error:
            raise UnsupportedModel(
                f"{file}: {key} has the pattern {shown(pattern)}, which cannot be read: {error}",
                hint=MERGE_HINT,
            ) from None
    return compiled


def _matching(patterns: Patterns, full_name: str, otherwise: float) -> float:
    """Returns the value of the first matching pattern, else `otherwise`. Patterns match the full
    name or a suffix of it.
    """
    return next((number for pattern, number in patterns if pattern.fullmatch(full_name)), otherwise)


def _update(module: str, tensors: _Module, config: _Config, path: Path) -> ModuleUpdate:
    parts = tensors.parts
    table = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A", "lora_B")
    if table and ("lora_A" in parts or "lora_B" in parts):
        raise WeightMismatch(
            f"{path}: {module} has matrices of both a linear layer and an embedding table"
        )
    a, b = (parts.get(name) for name in names)
    has_magnitude = "lora_magnitude_vector" in parts
    if (a is None) != (b is None):
        raise WeightMismatch(
            f"{path}: {module} has {names[a is None]}, but no {names[a is not None]}"
        )
    if a is None and (has_magnitude or "lora_B.bias" in parts):
        raise WeightMismatch(f"{path}: {module} has a magnitude or bias, but no {names[0]}")
    if a is not None and has_magnitude != config.use_dora:
        what = "a magnitude vector" if has_magnitude else "no magnitude vector"
        raise WeightMismatch(
            f"{path}: {module} has {what}, but {CONFIG} sets use_dora to {config.use_dora}"
        )
    if table and has_magnitude:
        raise UnsupportedModel(
            f"{path}: {module} is an embedding table with DoRA, which is not supported",
            hint=MERGE_HINT,
        )
    if a is not None and b is not None:
        _check_ranks(module, a, b, config.get_rank(tensors.full_name), path)
    return ModuleUpdate(
        module,
        scale=config.get_scale(tensors.full_name) if a is not None else 0.0,
        a=a,
        b=b,
        is_table=table,
        magnitude=_vector(parts, "lora_magnitude_vector"),
        bias=_vector(parts, "bias"),
        added_bias=_vector(parts, "lora_B.bias"),
        base=parts.get("base"),
    )


def _check_ranks(module: str, a: NDArray, b: NDArray, rank: int, path: Path) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise WeightMismatch(
            f"{path}: {module} has A of shape {a.shape} and B of shape {b.shape}, but {CONFIG}"
            f" sets rank {rank}",
            hint="config and tensors belong to different adapters, or a file is damaged",
        )


def _vector(parts: Mapping[str, NDArray], name: str) -> NDArray[np.float32] | None:
    array = parts.get(name)
    return None if array is None else array.astype(np.float32).reshape(-1)


def _digest(updates: Iterable[ModuleUpdate]) -> bytes:
    """Returns a digest of names, shapes, types, values and scales."""
    digest = hashlib.blake2b(digest_size=32)
    for update in sorted(updates, key=lambda each: each.module):
        for piece in _pieces(update):
            digest.update(struct.pack("<Q", len(piece)))
            digest.update(piece)
    return digest.digest()


def _pieces(update: ModuleUpdate) -> Iterator[bytes]:
    yield update.module.encode()
    yield struct.pack("<d?", update.scale, update.is_table)
    for array in (update.a, update.b, update.magnitude, update.bias, update.added_bias):
        if array is None:
            yield b""
        else:
            yield f"{array.dtype.name} {array.shape}".encode()
            yield array.tobytes()
