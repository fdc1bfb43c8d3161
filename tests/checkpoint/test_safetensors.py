"""Hugging Face directories: views, shards, prefixes, and damaged files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.api.errors import SetupError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.open import open_checkpoint
from tests.support.tiers import examples
from tests.support.tiny_gguf import tiny_model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_saved_models_bitwise(tmp_path: Path, dtype: str, shard_size: str) -> None:
    model = tiny_model("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["model_type"] == "llama" and not checkpoint.output_major
    assert checkpoint.tokenizer_source() is None
    for name, tensor in model.state_dict().items():
        packed = checkpoint.tensor(name)
        assert not packed.codes.flags.owndata, "a view into the mapped file"
        assert packed.bits == tensor.element_size() * 8
        np.testing.assert_array_equal(packed.dequantize(), tensor.float().numpy())


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
        ("norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_base_models_and_wrappers(tmp_path: Path, stored: str, asked: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, {stored: torch.ones(3)}))
    assert checkpoint.tensor(asked).shape == (3,)
    with pytest.raises(WeightMismatch, match=r"the tensor model\.other is missing"):
        checkpoint.tensor("model.other")


def test_other_dtypes_are_refused_where_used(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        write(tmp_path, {"w": torch.ones(3), "ids": torch.ones(3, dtype=torch.int64)})
    )
    assert checkpoint.tensor("w").shape == (3,)
    with pytest.raises(UnsupportedModel, match="ids has dtype I64, supported: F32, F16, BF16"):
        checkpoint.tensor("ids")


def test_missing_files_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightMismatch, match=f"missing shards: {shard.name}"):
        open_checkpoint(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    with pytest.raises(WeightMismatch, match=r"no \*\.safetensors file"):
        open_checkpoint(tmp_path)


def test_index_that_promises_too_much(tmp_path: Path, caplog) -> None:
    write(tmp_path, {"a": torch.ones(3)})
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(tmp_path)
    assert "1 tensors are missing from all shards, the first is b" in caplog.text
    assert checkpoint.tensor("a").shape == (3,)
    with pytest.raises(WeightMismatch, match="the tensor b is missing"):
        checkpoint.tensor("b")


@pytest.mark.parametrize("weight_map", [5, {}, {"a": 5}, {"a": None}, ["a"]])
def test_index_without_a_weight_map(tmp_path: Path, weight_map: object) -> None:
    write(tmp_path, {"a": torch.ones(3)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightMismatch, match="has no weight_map from tensors to files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"data_offsets": ["0", "12"]},
        {"data_offsets": [-12, 0]},
        {"data_offsets": [12, 0]},
        {"data_offsets": [0, 1e400]},
        {"data_offsets": [0, 12, 24]},
        {"data_offsets": None},
        {"shape": [-3, -1]},
        {"shape": [1.5, 2]},
        {"shape": 3},
    ],
)
def test_a_header_with_wrong_fields(tmp_path: Path, fields: dict[str, object]) -> None:
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | fields}
    ).encode()
    write(tmp_path, {"a": torch.ones(3)})
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(24)
    )
    with pytest.raises(WeightMismatch, match=r"model\.safetensors: not a valid safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"1", b'"x"', b"\xff"])
def test_a_header_that_is_no_table(tmp_path: Path, text: bytes) -> None:
    write(tmp_path, {"a": torch.ones(3)})
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(WeightMismatch, match="its header is damaged"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 30, 200, -1])
def test_truncated(tmp_path: Path, cut: int) -> None:
    file = write(tmp_path, {"a": torch.ones(100), "b": torch.ones(50)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(WeightMismatch, match=r"model\.safetensors: not a valid safetensors file"):
        open_checkpoint(tmp_path)


def test_bad_json(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(3)})
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(WeightMismatch, match=r"config\.json: not valid JSON"):
            open_checkpoint(tmp_path)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_damaged_headers_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged")
    file = (
        write(path, {"a": torch.ones(4, 3), "b": torch.ones(5, dtype=torch.float16)})
        / "model.safetensors"
    )
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.tensor(name)
    except SetupError as error:
        assert "model.safetensors" in str(error)
