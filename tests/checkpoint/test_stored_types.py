"""Weights in other files and types: pickled ones, and float64, int8 and uint8 ones, which are
converted as transformers converts them. Tensors bitwise, and next tokens those of transformers.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from octavo import SamplingParams
from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.open import open_checkpoint
from tests.support.llm_tools import make_llm
from tests.support.tiny_models import tiny_model

PROMPT = [5, 9, 17, 3, 28]


def files(folder: Path, tensors: dict[str, torch.Tensor], dtype: str) -> Path:
    config = tiny_model("llama").config
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def state_dict() -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama").path, dtype=torch.float32)
    found: dict[str, torch.Tensor] = {
        name: tensor.clone() for name, tensor in model.state_dict().items()
    }
    return found


def pickled(folder: Path, tensors: dict[str, torch.Tensor], **options) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(tiny_model("llama").path / "config.json", folder)
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    return folder


def check_against_transformers(folder: Path) -> None:
    """Compares every tensor, and greedy tokens."""
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    for name, tensor in theirs.state_dict().items():
        if name in checkpoint.names():
            found = checkpoint.tensor(name).dequantize()
            np.testing.assert_array_equal(found, tensor.float().numpy(), err_msg=name)
            assert checkpoint.get_format(name) == {4: "F32", 2: "BF16"}[tensor.element_size()]
    with torch.no_grad():
        row = theirs.float()(torch.tensor([PROMPT])).logits[0, -1]
    with make_llm(model_path=folder, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert output.outputs[0].token_ids[0] == int(row.argmax())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_float64_is_converted(tmp_path: Path, dtype: str) -> None:
    tensors = {name: tensor.double() for name, tensor in state_dict().items()}
    folder = files(tmp_path, tensors, dtype)
    if dtype == "float64":  # computed in float32 here
        checkpoint = open_checkpoint(folder)
        for name, tensor in tensors.items():
            expected = tensor.float().numpy()
            np.testing.assert_array_equal(checkpoint.tensor(name).dequantize(), expected)
        return
    check_against_transformers(folder)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_whole_numbers_of_a_plain_model_are_converted(tmp_path: Path, kind: torch.dtype) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    name = "model.layers.0.mlp.down_proj.weight"
    low, high = (-128, 128) if kind == torch.int8 else (0, 256)
    tensors[name] = torch.randint(low, high, tensors[name].shape, generator=generator).to(kind)
    check_against_transformers(files(tmp_path, tensors, "bfloat16"))


def test_whole_numbers_of_a_quantised_model_stay_codes(tmp_path: Path) -> None:
    folder = files(tmp_path, {"x.weight": torch.ones(2, 2, dtype=torch.uint8)}, "float32")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"x\.weight has dtype U8, supported: F32"):
        open_checkpoint(folder).tensor("x.weight")


def test_a_damaged_tensor_of_a_converted_type_is_found(tmp_path: Path) -> None:
    folder = files(tmp_path, {"x": torch.ones(4, dtype=torch.float64)}, "float32")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[4]', b'"shape":[5]'))
    with pytest.raises(WeightMismatch, match=r"x has 32 bytes, F64 of shape \(5,\) needs another"):
        open_checkpoint(folder)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_pickled_model_is_read(tmp_path: Path, dtype: torch.dtype, is_zip: bool) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder = pickled(tmp_path, tensors, _use_new_zipfile_serialization=is_zip)
    checkpoint = open_checkpoint(folder)
    for name, tensor in tensors.items():
        found = checkpoint.tensor(name).dequantize()
        np.testing.assert_array_equal(found, tensor.float().numpy(), err_msg=name)
    if dtype == torch.float32:
        check_against_transformers(folder)


def test_shared_and_strided_tensors_are_read(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    folder = pickled(tmp_path, {"a": whole.T, "b": whole[1:], "c": whole})
    checkpoint = open_checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensor("a").dequantize(), whole.T.numpy())
    np.testing.assert_array_equal(checkpoint.tensor("b").dequantize(), whole[1:].numpy())


def test_pickled_shards_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    tensors = state_dict()
    names = sorted(tensors)
    folder = pickled(tmp_path, {})
    (folder / "pytorch_model.bin").unlink()
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    check_against_transformers(folder)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(WeightMismatch, match="missing shards: pytorch_model-00002-of-00002"):
        open_checkpoint(folder)


class Unsafe:
    def __reduce__(self):
        return (print, ("run by a pickle",))


def test_a_pickle_runs_nothing(tmp_path: Path, capsys) -> None:
    folder = pickled(tmp_path, {"a": Unsafe()})  # type: ignore[dict-item]
    with pytest.raises(
        WeightMismatch, match=r"cannot be read with torch\.load\(weights_only=True"
    ) as found:
        open_checkpoint(folder)
    assert found.value.message.endswith("GLOBAL print was not an allowed global by default.")
    assert "run by" not in capsys.readouterr().out
    (folder / "pytorch_model.bin").write_bytes(b"PK damaged")
    with pytest.raises(WeightMismatch, match="cannot be read with"):
        open_checkpoint(folder)


def test_without_pytorch_the_error_has_the_command(tmp_path: Path, monkeypatch) -> None:
    folder = pickled(tmp_path, {"a": torch.ones(2)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel) as error:
        open_checkpoint(folder)
    message, hint = str(error.value).splitlines()
    assert "reading pickled weights requires PyTorch" in message
    assert "pip install torch" in hint and ".save_pretrained(" in hint


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    folder = files(tmp_path, {"a": torch.zeros(2)}, "float32")
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    assert not open_checkpoint(folder).tensor("a").dequantize().any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("consolidated.00.pth", "convert_llama_weights_to_hf"),
        ("model.pt", "save_pretrained"),
        ("last.ckpt", "save_pretrained"),
        ("tf_model.h5", "from_tf=True"),
        ("flax_model.msgpack", "from_flax=True"),
        ("model.onnx", "save_pretrained"),
        ("rust_model.ot", "save_pretrained"),
        ("weights.bin", "save_pretrained"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_other_weights_are_named_with_a_hint(tmp_path, name, words, has_config) -> None:
    if has_config:
        shutil.copy(tiny_model("llama").path / "config.json", tmp_path)
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(WeightMismatch) as error:
        open_checkpoint(tmp_path)
    message, hint = str(error.value).splitlines()
    assert f"; {name} is " in message and message.endswith("which is not supported")
    assert words in hint
    with pytest.raises(UnsupportedModel, match=r"expected a \.gguf file or a") as error:
        open_checkpoint(tmp_path / name)
    assert words in str(error.value).splitlines()[1]


def test_a_file_of_a_directory_is_not_the_model(tmp_path: Path) -> None:
    folder = files(tmp_path, {"a": torch.zeros(2)}, "float32")
    with pytest.raises(UnsupportedModel, match=f"hint: use its directory: {folder}"):
        open_checkpoint(folder / "model.safetensors")
