"""bitsandbytes checkpoints: the numbers are those of the format's formula, whole models compute
with them, and damaged ones are refused.

The formula was compared with bitsandbytes 0.50 on a CPU, bit for bit, for rows of whole blocks; its
kernel there errs where blocks cross rows, which its quantiser makes by the formula below.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.api.errors import SetupError
from octavo.checkpoint.formats.bitsandbytes import Bitsandbytes
from octavo.checkpoint.open import ConfigFile, open_checkpoint
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96}
IDS = np.random.default_rng(1).integers(0, 250, 40)
BLOCK = 64
NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)
"""Numbers of NF4's codes (Dettmers et al. 2023, appendix E)."""
NESTED = np.linspace(-1, 1, 256).astype(np.float32)
FORMS = ("nf4", "fp4", "double", "int8")

Tensors = dict[str, np.ndarray]


def four_bits(weight: np.ndarray, kind: str, *, nested: bool) -> tuple[Tensors, np.ndarray]:
    """Returns a module's tensors and the numbers that they stand for."""
    flat = weight.reshape(-1)
    padded = np.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(padded).max(axis=1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "shape": list(weight.shape)}
    tensors: Tensors = {"weight.absmax": scales, "weight.quant_map": NF4}
    if nested:
        offset = float(scales.mean())
        rest = scales - np.float32(offset)
        blocks = np.pad(rest, (0, -len(rest) % 256)).reshape(-1, 256)
        tops = np.abs(blocks).max(axis=1).astype(np.float32)
        ratios = rest / np.repeat(tops, 256)[: len(rest)]
        codes = np.abs(ratios[:, None] - NESTED).argmin(axis=1).astype(np.uint8)
        scales = NESTED[codes] * np.repeat(tops, 256)[: len(rest)] + np.float32(offset)
        tensors["weight.absmax"] = codes
        tensors |= {"weight.nested_absmax": tops, "weight.nested_quant_map": NESTED}
        state |= {"nested_blocksize": 256, "nested_offset": offset}
    codes = np.abs(padded[..., None] / scales[:, None, None] - NF4).argmin(axis=-1)
    values = (NF4[codes] * scales[:, None]).reshape(-1)[: len(flat)].reshape(weight.shape)
    pairs = codes.reshape(-1, 2)[: -(-len(flat) // 2)]
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8)[:, None]
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = raw.copy()
    return tensors, values


def eight_bits(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    tops = np.abs(weight).max(axis=1).astype(np.float32)
    codes = np.rint(weight / tops[:, None] * 127).astype(np.int8)
    tensors = {"weight": codes, "SCB": tops, "weight_format": np.zeros((), np.uint8)}
    return tensors, codes * (tops * np.float32(1 / 127))[:, None]


def write(folder: Path, form: str) -> Tensors:
    """Writes a tiny model with its projections in a form; returns the numbers they stand for."""
    tiny = tiny_model("llama", **SIZES)
    kind = "fp4" if form == "fp4" else "nf4"
    config = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": kind}
    config |= {"load_in_8bit": form == "int8", "load_in_4bit": form != "int8"}
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config | {"quantization_config": config}))
    stored, meant = {}, {}
    for key, tensor in load_file(tiny.path / "model.safetensors").items():
        if "_proj" not in key:
            stored[key] = meant[key] = tensor
            continue
        made, meant[key] = (
            eight_bits(tensor)
            if form == "int8"
            else four_bits(tensor, kind, nested=form == "double")
        )
        stored |= {f"{key.removesuffix('.weight')}.{rest}": value for rest, value in made.items()}
    save_file(stored, folder / "model.safetensors")
    return meant


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_the_formulas(tmp_path: Path, form: str) -> None:
    meant = write(tmp_path, form)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(meant)
    for key, values in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(key).dequantize(), values)
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    planned = ConfigFile(tmp_path / "config.json").get_format(up)
    assert checkpoint.get_format(up) == planned == ("I8" if form == "int8" else "L4_F32:64")
    cut = "I8" if form == "int8" else "L4_F32:32"
    assert checkpoint.get_format(down) == cut, "blocks cross rows"
    assert form == "int8" or checkpoint.tensor(down).bits == 4


def test_blocks_that_cross_rows_anywhere_become_floats() -> None:
    weight = np.random.default_rng(0).normal(size=(6, 80)).astype(np.float32)
    tensors, values = four_bits(weight, "nf4", nested=False)
    reader = Bitsandbytes({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    assert reader.describe("layer", tensors) == ((6, 80), "F32")
    np.testing.assert_array_equal(reader.weight("layer", tensors).dequantize(), values)


@pytest.mark.parametrize("form", FORMS)
def test_models_compute_with_them(tmp_path: Path, form: str) -> None:
    """Torch is within 3e-5 of the reference, and native, whose rows stay floats beside 4 bits."""
    write(tmp_path, form)
    wanted = PagedRunner(tmp_path).logits(IDS)
    native = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    found = PagedRunner(tmp_path, native).logits(IDS)
    np.testing.assert_array_equal(PagedRunner(tmp_path, native).logits(IDS, 3), found)
    if form == "int8":
        assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
        return
    atol = 3e-5 * abs(wanted).max()
    on_torch = PagedRunner(tmp_path, TorchBackend(BackendOptions(num_threads=1)))
    np.testing.assert_allclose(on_torch.logits(IDS), wanted, rtol=0, atol=atol)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_tiles_take_the_bits_of_their_codes(tmp_path: Path) -> None:
    write(tmp_path, "double")
    checkpoint = open_checkpoint(tmp_path)
    program = build_programs(checkpoint.config)["decoder"]
    backend = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    sizes = backend.footprint(program, loaded_formats(checkpoint, "auto", None, program))
    prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
    assert sum(sizes.weight_bytes.values()) == prepared.weight_bytes
    bits = {
        name: 8 * size / np.prod(weight.shape)
        for weight, size in sizes.weight_bytes.items()
        for name in ("up_proj", "down_proj")
        if name in weight.name
    }
    assert bits == {"up_proj": 4.5, "down_proj": 5}, "an fp32 for 64 codes, or for 32"


@pytest.mark.parametrize("form", ["double", "int8"])
@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_model_is_refused(tmp_path: Path, form: str, seed: int) -> None:
    """A tensor that is gone, of another type or shape, or damaged JSON: each is a SetupError that
    names the module.
    """
    write(tmp_path, form)
    draw = random.Random(seed)
    tensors = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.mlp.up_proj."
    name = draw.choice(sorted(key for key in tensors if key.startswith(module)))
    kind = draw.choice(("drop", "cut", "type"))
    if name.endswith("weight_format"):
        tensors[name] = np.ones((), np.uint8)
    elif kind == "drop" and not name.endswith(("SCB", "nf4")):
        del tensors[name]
    elif kind == "type" and tensors[name].dtype != np.float32 and not name.endswith("absmax"):
        tensors[name] = tensors[name].astype(np.int32)
    else:
        tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"up_proj"):
        open_checkpoint(tmp_path).tensor(f"{module}weight")
