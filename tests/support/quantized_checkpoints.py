"""Tiny models whose projections are stored in GPTQ's, AWQ's or compressed-tensors' forms, and the
numbers that they stand for.

Words are made from Python's own integers, one column after another, as the formats' descriptions
have it; compressed-tensors' by its own package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import TinyModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32

Tensors = dict[str, torch.Tensor]


class Grid(NamedTuple):
    """Codes of a matrix `[out, in]` with the scale and the zero of each group, `[out, groups]`."""

    codes: NDArray[np.int64]
    scales: NDArray[np.float16]
    zeros: NDArray[np.int64]
    groups: NDArray[np.int64]
    """Group of each input."""

    @property
    def values(self) -> torch.Tensor:
        scales, zeros = self.scales.astype(np.float64), self.zeros
        found = (self.codes - zeros[:, self.groups]) * scales[:, self.groups]
        return torch.from_numpy(found.astype(np.float32))


def grid_of(
    tensor: torch.Tensor, bits: int, *, symmetric: bool, shuffled: bool, seed: int = 0
) -> Grid:
    """Rounds a matrix to a grid for each group of inputs; `shuffled` puts any inputs together."""
    weight = tensor.double().numpy()
    inputs = weight.shape[1]
    group = min(GROUP, inputs)
    groups = np.arange(inputs) // group
    if shuffled:
        groups = np.random.default_rng(seed).permutation(groups)
    parts = np.stack([weight[:, groups == g] for g in range(inputs // group)], axis=1)
    top = 2**bits - 1
    low, high = parts.min(-1), parts.max(-1)
    if symmetric:
        scales = (2 * np.abs(parts).max(-1) / top + 1e-4).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        scales = ((high - low) / top + 1e-4).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(np.int64)
    steps = np.rint(weight / scales.astype(np.float64)[:, groups]) + zeros[:, groups]
    return Grid(np.clip(steps, 0, top).astype(np.int64), scales, zeros, groups)


def words_of(numbers: Sequence[int], bits: int) -> list[int]:
    """Returns numbers of a few bits side by side, lowest first, in words of 32 with a sign."""
    stream = sum(int(number) << bits * index for index, number in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    words = [stream >> 32 * index & 0xFFFFFFFF for index in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def packed(rows: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Packs the numbers of each row."""
    return torch.tensor([words_of(row, bits) for row in rows.tolist()], dtype=torch.int32)


def gptq_tensors(grid: Grid, bits: int, *, less_one: bool, with_index: bool) -> Tensors:
    stored = (grid.zeros - less_one).T & (2**bits - 1)
    tensors = {
        "qweight": packed(grid.codes, bits).T,
        "qzeros": packed(stored, bits),
        "scales": torch.from_numpy(grid.scales).T,
    }
    index = {"g_idx": torch.from_numpy(grid.groups.astype(np.int32))} if with_index else {}
    return {name: tensor.contiguous() for name, tensor in (tensors | index).items()}


def awq_tensors(grid: Grid, *, by_output: bool) -> Tensors:
    if by_output:
        groups = grid.zeros.shape[1]
        pad = ((0, 0), (0, -groups % 32))  # groups of 32 inputs: zeros in multiples of four words
        return {
            "qweight": packed(grid.codes, 4),
            "qzeros": packed(np.pad(grid.zeros, pad), 4),
            "scales": torch.from_numpy(np.pad(grid.scales, pad)),
        }

    def ordered(rows: NDArray[np.int64]) -> torch.Tensor:
        return packed(rows.reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(len(rows), -1), 4)

    return {
        "qweight": ordered(grid.codes.T),
        "qzeros": ordered(grid.zeros.T),
        "scales": torch.from_numpy(grid.scales.T.copy()),
    }


def gptq(
    bits: int = 4, *, sym: bool = True, act_order: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "sym": sym,
        "desc_act": act_order,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq-2": gptq(2),
    "gptq-3": gptq(3, sym=False),
    "gptq-4": gptq(),
    "gptq-4-zeros": gptq(sym=False),
    "gptq-4-second": gptq(sym=False, checkpoint_format="gptq_v2"),
    "gptq-4-mislabelled": gptq(checkpoint_format="gptq"),
    "gptq-4-order": gptq(act_order=True),
    "gptq-8": gptq(8),
    "gptq-8-zeros": gptq(8, sym=False, act_order=True),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "awq-gemv": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv"},
}


def write_quantized(tiny: TinyModel, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Writes the model into the folder; returns the weights that the files stand for, fp32."""
    config = CONFIGS[name]
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config | {"quantization_config": config}))
    stored, meant = {}, {}
    for key, tensor in load_file(tiny.path / "model.safetensors").items():
        if "_proj" not in key or tensor.ndim != 2:
            stored[key] = meant[key] = tensor
            continue
        grid, tensors = _quantized(tensor, config, second=name.endswith("mislabelled"))
        module = key.removesuffix(".weight")
        stored |= {f"{module}.{rest}": value for rest, value in tensors.items()}
        meant[key] = grid.values
    save_file(stored, folder / "model.safetensors")
    return meant


def _quantized(
    tensor: torch.Tensor, config: dict[str, Any], *, second: bool
) -> tuple[Grid, Tensors]:
    if config["quant_method"] == "awq":
        grid = grid_of(tensor, 4, symmetric=False, shuffled=False)
        return grid, awq_tensors(grid, by_output=config["version"] == "gemv")
    is_shuffled = config["desc_act"]
    grid = grid_of(tensor, config["bits"], symmetric=config["sym"], shuffled=is_shuffled)
    less_one = config.get("checkpoint_format", "gptq") == "gptq" and not second
    if less_one:  # a stored zero of -1 does not exist
        grid = grid._replace(zeros=np.maximum(grid.zeros, 1))
    return grid, gptq_tensors(grid, config["bits"], less_one=less_one, with_index=True)
