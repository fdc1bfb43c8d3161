"""MXFP4 as gpt-oss has it: lossless against transformers, whole models on every backend, and bad
input. And GPT-2, whose floats are [in, out], with codes of GPTQ, which are [out, in].
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.open import ConfigFile, open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import gptq, gptq_tensors, grid_of
from tests.support.tiny_models import tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96}
IDS = np.random.default_rng(1).integers(0, 250, 40)
GATES = "model.layers.0.mlp.experts.gate_up_proj"


def write(folder: Path, twin: Path) -> None:
    """Writes a tiny gpt-oss with random codes, and its twin with the numbers that they mean."""
    tiny = tiny_model("gpt_oss", **SIZES)
    torch.manual_seed(3)
    packed, plain = {}, {}
    for name, tensor in load_file(tiny.path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    for path, tensors, more in (
        (folder, packed, {"quantization_config": {"quant_method": "mxfp4"}}),
        (twin, plain, {}),
    ):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(tiny.config | more))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mxfp4")
    write(folder / "codes", folder / "floats")
    return folder / "codes", folder / "floats"


def test_lossless(models: tuple[Path, Path]) -> None:
    codes, floats = map(open_checkpoint, models)
    assert set(codes.names()) == set(floats.names())
    for name in floats.names():
        wanted = floats.tensor(name).dequantize()
        found = codes.tensor(name)
        if not found.is_float:
            wanted = wanted.swapaxes(-1, -2)
            assert found.bits == 4
        np.testing.assert_array_equal(found.dequantize(), wanted)
    program = build_programs(codes.config)["decoder"]
    check_tensors(codes, [program])
    planned = ConfigFile(models[0] / "config.json")
    assert planned.get_format(GATES) == codes.get_format(GATES) == "L4I_F32:32"
    assert planned.get_format(f"{GATES}_bias") == "F32"


def test_extreme_powers(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The smallest power of two is a subnormal, the largest that is a number keeps its codes."""
    path = shutil.copytree(models[0], tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    scales = tensors[f"{GATES}_scales"]
    scales.view(-1)[:4] = torch.tensor([0, 1, 252, 251], dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    wanted = convert_moe_packed_tensors(tensors[f"{GATES}_blocks"], scales, dtype=torch.float32)
    found = open_checkpoint(path).tensor(GATES).dequantize()
    np.testing.assert_array_equal(found, wanted.numpy().swapaxes(-1, -2))


def test_backends_run_the_codes(models: tuple[Path, Path]) -> None:
    wanted = PagedRunner(models[1]).logits(IDS)
    np.testing.assert_array_equal(PagedRunner(models[0]).logits(IDS), wanted)
    on_torch = TorchBackend(BackendOptions(num_threads=1))
    found = PagedRunner(models[0], on_torch).logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())
    options = BackendOptions(num_threads=1)
    found = PagedRunner(models[0], NativeBackend(options)).logits(IDS)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
    again = PagedRunner(models[0], NativeBackend(options)).logits(IDS, 3)
    np.testing.assert_array_equal(again, found)


def test_the_footprint_is_that_of_four_bits(models: tuple[Path, Path]) -> None:
    checkpoint = open_checkpoint(models[0])
    program = build_programs(checkpoint.config)["decoder"]
    format_of = loaded_formats(checkpoint, "auto", None, program)
    backend = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    footprint = backend.footprint(program, format_of)
    prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
    assert sum(footprint.weight_bytes.values()) == prepared.weight_bytes
    experts = {w: size for w, size in footprint.weight_bytes.items() if w.name == GATES}
    outputs = sum(weight.shape[0] * -(-weight.shape[1] // 16) * 16 for weight in experts)
    assert sum(experts.values()) == outputs * SIZES["hidden_size"] * 5 // 8  # an fp32 for 32 codes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{GATES}_scales"), "scales is missing, found only blocks"),
        (lambda t: t.pop(f"{GATES}_blocks"), "blocks are missing"),
        (lambda t: t.update({f"{GATES}_scales": t[f"{GATES}_scales"][:, 1:]}), "has shape"),
        (lambda t: t.update({f"{GATES}_blocks": t[f"{GATES}_blocks"].float()}), "is float32"),
    ],
)
def test_bad_input(models: tuple[Path, Path], tmp_path: Path, change: Any, message: str) -> None:
    path = shutil.copytree(models[0], tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    whole = {name: each.contiguous() for name, each in tensors.items()}
    save_file(whole, path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=message):
        checkpoint = open_checkpoint(path)
        check_tensors(checkpoint, [build_programs(checkpoint.config)["decoder"]])


def test_codes_of_matrices_that_are_kept_turned(tmp_path: Path) -> None:
    """GPT-2's floats are [in, out]; GPTQ's codes of the same matrices are not."""
    tiny = tiny_model("gpt2", n_embd=64, n_head=4, n_inner=128)
    packed, plain = {}, {}
    for name, tensor in load_file(tiny.path / "model.safetensors").items():
        packed[name] = plain[name] = tensor
        if ".c_" in name and tensor.ndim == 2:
            del packed[name]
            grid = grid_of(tensor.T, 4, symmetric=True, shuffled=False)
            tensors = gptq_tensors(grid, 4, less_one=True, with_index=True)
            packed |= {f"{name.removesuffix('weight')}{rest}": t for rest, t in tensors.items()}
            plain[name] = grid.values.T.contiguous()
    for folder, tensors, config in (
        ("codes", packed, tiny.config | {"quantization_config": gptq()}),
        ("floats", plain, tiny.config),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    wanted = PagedRunner(tmp_path / "floats").logits(IDS)
    np.testing.assert_array_equal(PagedRunner(tmp_path / "codes").logits(IDS), wanted)
    native = NativeBackend(BackendOptions(num_threads=1))
    found = PagedRunner(tmp_path / "codes", native).logits(IDS)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
