"""compressed-tensors checkpoints, as its own package writes them: lossless against its own
decompression, and run by every backend.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import TinyModel, tiny_model

torch.set_num_threads(1)

SIZES = {"intermediate_size": 96, "num_key_value_heads": 2}
IDS = np.random.default_rng(1).integers(0, 250, 40)
DOWN = "model.layers.0.mlp.down_proj"


def weights(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits": ("pack-quantized", weights(4, "group", group_size=32)),
    "4 bits, zeros": ("pack-quantized", weights(4, "group", group_size=32, symmetric=False)),
    "3 bits": ("pack-quantized", weights(3, "group", group_size=32)),
    "4 bits by channel": ("pack-quantized", weights(4, "channel")),
    "8 bits packed": ("pack-quantized", weights(8, "channel")),
    "8 bits": ("int-quantized", weights(8, "channel")),
    "8 bits in all": ("int-quantized", weights(8, "tensor")),
    "fp8": ("float-quantized", weights(8, "channel", type="float")),
    "nvfp4": ("nvfp4-pack-quantized", weights(4, "tensor_group", type="float", group_size=16)),
    "mxfp4": ("mxfp4-pack-quantized", weights(4, "group", type="float", group_size=32)),
}


def write(tiny: TinyModel, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Writes the model into the folder; returns the weights that the files stand for, fp32."""
    form, arguments = FORMATS[name]
    rows = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**arguments),
        input_activations=rows if name.startswith("8 bits") else None,
    )
    compressor = BaseCompressor.get_value_from_registry(form)
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(tiny.config | {"quantization_config": config}))
    stored, meant = {}, {}
    for key, tensor in load_file(tiny.path / "model.safetensors").items():
        if "_proj" not in key or tensor.ndim != 2:
            stored[key] = meant[key] = tensor
            continue
        module = key.removesuffix(".weight")
        state = {"weight": tensor} | levels_of(tensor, scheme.weights)
        compressed = compressor.compress(state, scheme)
        stored |= {f"{module}.{rest}": value.contiguous() for rest, value in compressed.items()}
        meant[key] = meant_by(compressor, compressed, scheme)
    save_file(stored, folder / "model.safetensors")
    return meant


def meant_by(
    compressor: Any, compressed: dict[str, torch.Tensor], scheme: QuantizationScheme
) -> torch.Tensor:
    """Returns what tensors stand for, in fp32; for 4-bit floats the package rounds it to bf16."""
    if scheme.weights.type != "float" or scheme.weights.num_bits == 8:
        return compressor.decompress(compressed, scheme)["weight"]
    packed, scale = compressed["weight_packed"], compressed["weight_scale"]
    codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
    if scale.dtype == torch.uint8:
        wide = torch.exp2(scale.double() - 127).float()
    else:
        wide = scale.float() / compressed["weight_global_scale"]
    return codes * wide.repeat_interleave(scheme.weights.group_size, dim=1)


def levels_of(tensor: torch.Tensor, arguments: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Returns the scales and zeros of a matrix, in fp32, in which the package multiplies then."""
    parts = {
        "tensor": lambda: tensor.reshape(1, 1, -1),
        "channel": lambda: tensor[:, None],
    }.get(arguments.strategy, lambda: tensor.reshape(len(tensor), -1, arguments.group_size))()
    whole = None
    if arguments.strategy == "tensor_group":
        whole = torch.tensor([448.0 * 6 / float(tensor.abs().max())])
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments, global_scale=whole)
    if arguments.strategy == "tensor":
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    found = {"weight_scale": scales, "weight_zero_point": zeros}
    return found if whole is None else found | {"weight_global_scale": whole}


@pytest.mark.parametrize("name", FORMATS)
def test_lossless(tmp_path: Path, name: str) -> None:
    meant = write(tiny_model("llama", **SIZES), tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(meant)
    for key, tensor in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(key).dequantize(), tensor.float().numpy())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8"])
def test_backends_run_it(tmp_path: Path, name: str) -> None:
    """Logits on torch are within 3e-5 of the reference's, on native, which rounds rows to 8 bits,
    within 3% in the mean. The footprint is the memory that both take.
    """
    write(tiny_model("llama", **SIZES), tmp_path, name)
    wanted = PagedRunner(tmp_path).logits(IDS)
    on_torch, native = (
        kind(BackendOptions(num_threads=1, max_tokens=64)) for kind in (TorchBackend, NativeBackend)
    )
    found = PagedRunner(tmp_path, on_torch).logits(IDS, 17)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())
    found = PagedRunner(tmp_path, native).logits(IDS)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
    checkpoint = open_checkpoint(tmp_path)
    program = build_programs(checkpoint.config)["decoder"]
    format_of = loaded_formats(checkpoint, "auto", None, program)
    for kind in (TorchBackend, NativeBackend):
        backend = kind(BackendOptions(num_threads=1, max_tokens=64))
        prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
        footprint = backend.footprint(program, format_of)
        assert sum(footprint.weight_bytes.values()) == prepared.weight_bytes


def changed(folder: Path, **changes: Any) -> None:
    """Changes the config's one group."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_targets_are_names_classes_and_patterns(tmp_path: Path) -> None:
    meant = write(tiny_model("llama", **SIZES), tmp_path, "4 bits")
    for targets in (["re:.*_proj"], ["Linear", "no.such.module"]):
        changed(tmp_path, targets=targets)
        found = open_checkpoint(tmp_path).tensor(f"{DOWN}.weight")
        np.testing.assert_array_equal(found.dequantize(), meant[f"{DOWN}.weight"].numpy())
    changed(tmp_path, targets=["down_proj"])
    with pytest.raises(WeightMismatch, match="q_proj is quantized, but is not a target of"):
        open_checkpoint(tmp_path).tensor("model.layers.0.self_attn.q_proj.weight")
    changed(tmp_path, targets=["re:.*nothing"])
    with pytest.raises(WeightMismatch, match=r"its targets re:\.\*nothing match none of"):
        open_checkpoint(tmp_path)
    changed(tmp_path, targets=["re:("])
    with pytest.raises(UnsupportedModel, match=r"targets holds 're:\('"):
        open_checkpoint(tmp_path)


def test_the_closest_target_counts(tmp_path: Path) -> None:
    """A name goes before a pattern, a pattern before a class, wherever their groups stand."""
    four = write(tiny_model("llama", **SIZES), tmp_path / "4", "4 bits")
    eight = write(tiny_model("llama", **SIZES), tmp_path / "8", "8 bits packed")
    tensors = load_file(tmp_path / "4" / "model.safetensors")
    wide = load_file(tmp_path / "8" / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{DOWN}.")}
    tensors |= {key: value for key, value in wide.items() if key.startswith(f"{DOWN}.")}
    save_file(tensors, tmp_path / "4" / "model.safetensors")
    groups = {
        "class": {"targets": ["Linear"], "weights": weights(3, "group", group_size=32)},
        "pattern": {"targets": ["re:model.*"], "weights": FORMATS["4 bits"][1]},
        "name": {"targets": [DOWN], "weights": FORMATS["8 bits packed"][1]},
    }
    config = json.loads((tmp_path / "4" / "config.json").read_text())
    for order in (list(groups), list(groups)[::-1]):
        chosen = {name: groups[name] for name in order}
        config["quantization_config"]["config_groups"] = chosen
        (tmp_path / "4" / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(tmp_path / "4")
        for key, tensor in (four | {f"{DOWN}.weight": eight[f"{DOWN}.weight"]}).items():
            found = checkpoint.tensor(key).dequantize()
            np.testing.assert_array_equal(found, tensor.float().numpy())


def test_scales_of_rows_and_of_the_cache_are_left(tmp_path: Path) -> None:
    write(tiny_model("llama", **SIZES), tmp_path, "nvfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    one = torch.ones(1)
    tensors |= {f"{DOWN}.{rest}": one.clone() for rest in ("input_global_scale", "input_scale")}
    attention = "model.layers.0.self_attn"
    rests = ("k_scale", "v_scale", "q_scale", "k_zero_point", "k_proj.output_scale")
    tensors |= {f"{attention}.{rest}": one.clone() for rest in rests}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint, [build_programs(checkpoint.config, every_key=True)["decoder"]])


def test_a_cache_alone_may_be_quantised(tmp_path: Path) -> None:
    tiny = tiny_model("llama", **SIZES)
    shutil.copytree(tiny.path, tmp_path, dirs_exist_ok=True)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    quantized = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    quantized |= {"kv_cache_scheme": scheme}
    config = tiny.config | {"quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, wanted = (
        open_checkpoint(path).tensor(f"{DOWN}.weight") for path in (tmp_path, tiny.path)
    )
    np.testing.assert_array_equal(found.dequantize(), wanted.dequantize())
    config["quantization_config"]["kv_cache_scheme"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="format is 'dense', supported: pack-quantized"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("part", ["transform_config", "sparsity_config"])
def test_what_changes_the_meaning_is_refused(tmp_path: Path, part: str) -> None:
    write(tiny_model("llama", **SIZES), tmp_path, "4 bits")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"][part] = {"format": "dense"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    open_checkpoint(tmp_path)
    config["quantization_config"][part] = {"config_groups": {"R1": {}}, "format": "sparse-24"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"{part} is "):
        open_checkpoint(tmp_path)


DAMAGED = [
    ("4 bits", "weight_packed", torch.ones(64, 11, dtype=torch.int32), r"expected \(64, 12\)"),
    ("4 bits", "weight_scale", torch.ones(64, 2), r"expected \(64, 3\): groups of 32 inputs"),
    ("4 bits", "weight_shape", None, "weight_shape is missing, found only"),
    ("4 bits", "weight_shape", torch.tensor([64, 0]), r"weight_shape is \[64, 0\]"),
    ("4 bits, zeros", "weight_zero_point", None, "weight_zero_point is missing"),
    ("8 bits", "weight_scale", torch.ones(5, 1), r"expected \(64, 1\)"),
    ("nvfp4", "weight_global_scale", None, "weight_global_scale is missing"),
    ("mxfp4", "weight_packed", torch.ones(64, 50, dtype=torch.uint8), "in groups of 32"),
]


@pytest.mark.parametrize(("name", "rest", "value", "message"), DAMAGED)
def test_tensors_that_do_not_fit(
    tmp_path: Path, name: str, rest: str, value: torch.Tensor | None, message: str
) -> None:
    write(tiny_model("llama", **SIZES), tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{DOWN}.{rest}"]
    tensors |= {} if value is None else {f"{DOWN}.{rest}": value}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=message):
        open_checkpoint(tmp_path).tensor(f"{DOWN}.weight")
