"""Tiny models whose projections are stored in fp8, in the forms of compressed-tensors and
DeepSeek-V3, and the formats' own meaning.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import TinyModel

E4M3 = torch.float8_e4m3fn


def compressed_tensors(strategy: str, *, activations: bool = True) -> dict[str, Any]:
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    rows = (
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        if activations
        else None
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def fine_grained(rows: int, columns: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
    }


SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": compressed_tensors("tensor"),
    "channel": compressed_tensors("channel"),
    "weights only": compressed_tensors("channel", activations=False),
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "blocks": fine_grained(32, 16),
    "wide blocks": fine_grained(16, 32),
    "powers": fine_grained(16, 32),
}
BY_BLOCK = ("blocks", "wide blocks", "powers")
"""Schemes with a scale for each block; those of "powers" are powers of two, as e8m0."""


def in_fp8(tiny: TinyModel, folder: Path, scheme: str) -> dict[str, torch.Tensor]:
    """Writes the model into the folder; returns the weights that the file stands for, by name, in
    fp32.
    """
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(tiny.config | {"quantization_config": SCHEMES[scheme]})
    )
    stored, meant = {}, {}
    for name, tensor in load_file(tiny.path / "model.safetensors").items():
        if "_proj" not in name or tensor.ndim != 2:
            stored[name] = meant[name] = tensor
            continue
        codes, scales, spread = quantised(tensor, scheme)
        suffix = "_scale_inv" if scheme in BY_BLOCK else "_scale"
        stored[name], stored[name + suffix] = codes, scales
        if scheme == "static":
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.01)
        meant[name] = codes.float() * spread
    save_file(stored, folder / "model.safetensors")
    return meant


def quantised(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes, scales as the file has them, and scales that broadcast over the codes."""
    if scheme in ("tensor", "static"):
        scales = (weight.abs().max() / 448).reshape([1] if scheme == "tensor" else [])
        spread = scales.reshape(1, 1)
    elif scheme in BY_BLOCK:
        rows, columns = SCHEMES[scheme]["weight_block_size"]
        padded = torch.zeros(
            -(-weight.shape[0] // rows) * rows, -(-weight.shape[1] // columns) * columns
        )
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = padded.view(len(padded) // rows, rows, -1, columns).abs().amax(dim=(1, 3)) / 448
        if scheme == "powers":
            scales = torch.exp2(torch.ceil(torch.log2(scales))).to(torch.float8_e8m0fnu)
        spread = (
            scales.float()
            .repeat_interleave(rows, 0)
            .repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        )
    else:
        scales = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
        spread = scales.float()
    return (weight / spread).clamp(-448, 448).to(E4M3), scales, spread
