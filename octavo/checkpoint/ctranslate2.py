"""Converts Whisper models from CTranslate2's format to that of transformers.

The catalogue uses it for models that are published only in that format. Every count and size in the
file is checked against the remaining bytes. Source: CTranslate2's model_spec.py, version 6 of the
binary format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.writing.safetensors_file import NAMES, SafetensorsWriter, TensorSpec

VERSION, SPEC = 6, "WhisperSpec"
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
"""Data types, in the order of their numbers in the file."""

Variables = dict[str, NDArray[Any]]

LAYER_PARTS = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "self_attn.out_proj": "self_attention/linear_1",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "encoder_attn.q_proj": "attention/linear_0",
    "encoder_attn.out_proj": "attention/linear_2",
    "final_layer_norm": "ffn/layer_norm",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
}
"""Names of a layer's modules in transformers, and in CTranslate2."""

MERGED = {
    "self_attn": ("self_attention/linear_0", ("q_proj", "k_proj", "v_proj")),
    "encoder_attn": ("attention/linear_1", ("k_proj", "v_proj")),
}
"""Modules whose weights CTranslate2 stacks into one matrix."""


def convert_whisper(source: Path, target: Path) -> None:
    """Writes the model in `source` to `target` as model.safetensors, config.json,
    generation_config.json and tokenizer files.

    Raises UnsupportedModel if the file is damaged or not a Whisper model.
    """
    variables = read_variables(source / "model.bin")
    target.mkdir(parents=True, exist_ok=True)
    _write_tensors(target, dict(_rename_tensors(variables)))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    config = json.loads((source / "config.json").read_text())
    _write(target / "config.json", _config(variables, ids))
    _write(target / "generation_config.json", _generation_config(config, ids))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    _write(
        target / "tokenizer_config.json",
        {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
    )


def read_variables(path: Path) -> Variables:
    reader = _Reader(path)
    version = reader.number("<I")
    spec = reader.text()
    if version != VERSION or spec != SPEC:
        raise UnsupportedModel(
            f"{path}: got version {version} of {spec or 'no model'}, expected version {VERSION}"
            f" of {SPEC}"
        )
    reader.number("<I")  # revision of the specification
    variables: Variables = {}
    for _ in range(reader.number("<I")):
        name = reader.text()
        shape = tuple(reader.number("<I") for _ in range(reader.number("<B")))
        kind = reader.number("<B")
        if kind >= len(DTYPES):
            raise UnsupportedModel(f"{path}: {name} has the unknown type {kind}")
        data = np.frombuffer(reader.take(reader.number("<I")), DTYPES[kind])
        if data.size != int(np.prod(shape)):
            raise UnsupportedModel(f"{path}: {name} has {data.size} values, its shape is {shape}")
        variables[name] = data.reshape(shape)
    for _ in range(reader.number("<I")):
        alias, name = reader.text(), reader.text()
        variables[alias] = variables[name]
    return variables


class _Reader:
    """Sequential reader of a file, with bounds checks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = path.read_bytes()
        self._place = 0

    def take(self, num_bytes: int) -> bytes:
        end = self._place + num_bytes
        if end > len(self._data):
            raise UnsupportedModel(
                f"{self._path}: truncated: got {len(self._data):,} bytes, expected"
                f" at least {end:,}",
                hint="download the file again",
            )
        piece, self._place = self._data[self._place : end], end
        return piece

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        return self.take(self.number("<H")).rstrip(b"\0").decode("utf-8", "replace")


def _rename_tensors(variables: Variables) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the tensors under their names in transformers."""
    for stack in ("encoder", "decoder"):
        module = f"model.{stack}"
        yield f"{module}.embed_positions.weight", variables[f"{stack}/position_encodings/encodings"]
        yield from _norm(variables, f"{stack}/layer_norm", f"{module}.layer_norm")
        for index in range(_num_layers(variables, stack)):
            yield from _layer(variables, f"{stack}/layer_{index}", f"{module}.layers.{index}")
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            yield f"model.encoder.{conv}.{kind}", variables[f"encoder/{conv}/{kind}"]
    yield "model.decoder.embed_tokens.weight", variables["decoder/embeddings/weight"]


def _layer(variables: Variables, source: str, module: str) -> Iterator[tuple[str, NDArray[Any]]]:
    for theirs, ours in LAYER_PARTS.items():
        if ours.endswith("layer_norm") and f"{source}/{ours}/gamma" in variables:
            yield from _norm(variables, f"{source}/{ours}", f"{module}.{theirs}")
        elif f"{source}/{ours}/weight" in variables:
            for kind in ("weight", "bias"):
                yield f"{module}.{theirs}.{kind}", variables[f"{source}/{ours}/{kind}"]
    for name, (ours, parts) in MERGED.items():
        if f"{source}/{ours}/weight" not in variables:
            continue
        for kind in ("weight", "bias"):
            pieces = np.split(variables[f"{source}/{ours}/{kind}"], len(parts))
            for part, piece in zip(parts, pieces, strict=True):
                if (part, kind) != ("k_proj", "bias"):  # all zeros; transformers has none
                    yield f"{module}.{name}.{part}.{kind}", np.ascontiguousarray(piece)


def _norm(variables: Variables, source: str, module: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield f"{module}.weight", variables[f"{source}/gamma"]
    yield f"{module}.bias", variables[f"{source}/beta"]


def _num_layers(variables: Variables, stack: str) -> int:
    return 1 + max(
        int(name.split("/")[1].removeprefix("layer_"))
        for name in variables
        if name.startswith(f"{stack}/layer_") and not name.startswith(f"{stack}/layer_norm")
    )


def _config(variables: Variables, ids: dict[str, int]) -> dict[str, Any]:
    width, num_bands, _ = variables["encoder/conv1/weight"].shape
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (
            ("layers", _num_layers(variables, stack)),
            ("attention_heads", int(variables[f"{stack}/num_heads"])),
            ("ffn_dim", variables[f"{stack}/layer_0/ffn/linear_0/weight"].shape[0]),
        )
    }
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": width,
        "num_mel_bins": num_bands,
        "vocab_size": variables["decoder/embeddings/weight"].shape[0],
        "max_source_positions": variables["encoder/position_encodings/encodings"].shape[0],
        "max_target_positions": variables["decoder/position_encodings/encodings"].shape[0],
        "activation_function": "gelu",
        "torch_dtype": "float16",
        "eos_token_id": ids["<|endoftext|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        **stacks,
    }


def _generation_config(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Returns generation_config.json; an English-only model has no language tokens."""
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    is_multilingual = end == start - 1 and end >= 50257
    languages = {
        f"<|{name}|>": ids[f"<|{name}|>"]
        for name in (text.strip("<|>") for text in ids)
        if ids[f"<|{name}|>"] in config.get("lang_ids", [])
    }
    return {
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": config.get("suppress_ids", []),
        "begin_suppress_tokens": config.get("suppress_ids_begin", []),
        "alignment_heads": config.get("alignment_heads", []),
        "is_multilingual": is_multilingual,
        "lang_to_id": languages if is_multilingual else {},
        "task_to_id": (
            {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
            if is_multilingual
            else {}
        ),
    }


def _write_tensors(folder: Path, tensors: Variables) -> None:
    specs = [TensorSpec(name, NAMES[each.dtype], each.shape) for name, each in tensors.items()]
    writer = SafetensorsWriter(folder, specs, keeps=False)
    for name, each in tensors.items():
        writer.write(name, each)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")
