"""Every type of GGUF's blocks on native, as codes: near the reference, chunked as whole, in as few
bits as they have, or 4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.checkpoint.gguf.gguf_file import read_gguf
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.checkpoint.writing.gguf_file import GgufWriter
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from octavo.quant.gguf import BLOCK_TYPES, BlockType
from tests.quant.test_gguf import HALVES, random_blocks
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_gguf import SHAPE, write_tiny_gguf

WIDTHS = {"hidden_size": 256, "intermediate_size": 256}
IDS = np.random.default_rng(2).integers(0, 90, 30)
NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
TYPES = [name for name, number in NUMBERS.items() if BLOCK_TYPES[number].dtype is None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | WIDTHS), tie_word_embeddings=False))
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", model)


def blocks_of(kind: BlockType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draws blocks whose numbers are about 0.05."""
    number = NUMBERS[kind.name]
    raw = random_blocks(number, shape, seed).reshape(-1, kind.block_bytes)
    if kind.name == "MXFP4":
        raw[:, 0] = 122
    elif kind.name == "NVFP4":
        raw[:, :4] = 24
    else:
        for start in HALVES.get(kind.name, [0, 2]):
            raw[:, start + 1] = raw[:, start + 1] & 0x83 | 0x10
    values = kind.tensor(raw.reshape(-1), shape).dequantize()
    scale = 0.05 / max(float(values.std()), 1e-9)
    power = round(float(np.log2(scale)))
    if kind.name not in ("MXFP4", "NVFP4"):
        for start in HALVES.get(kind.name, [0, 2]):
            moved = ((raw[:, start + 1] >> 2 & 31).astype(int) + power).clip(1, 30)
            raw[:, start + 1] = raw[:, start + 1] & 0x83 | moved.astype(np.uint8) << 2
    return raw.reshape(-1)


def written(source: Path, path: Path, name: str) -> Path:
    """Writes the model with random blocks of a type in its matrices, but for the ends."""
    file, kind = read_gguf(source), BLOCK_TYPES[NUMBERS[name]]
    kinds = {
        tensor: kind
        for tensor, entry in file.tensors.items()
        if len(entry.shape) == 2 and tensor.startswith("blk.")
    }
    writer = GgufWriter(path, file, kinds, keeps=False)
    for seed, (tensor, entry) in enumerate(file.tensors.items()):
        if tensor in kinds:
            writer.write(tensor, blocks_of(kind, entry.shape, seed))
        else:
            writer.write(tensor, file.tensor_bytes(tensor))
    return path


def native() -> NativeBackend:
    return NativeBackend(BackendOptions(num_threads=1))


BITS = {
    **dict.fromkeys(("Q4_0", "IQ4_NL", "TQ1_0", "TQ2_0"), 4.5),
    **dict.fromkeys(("Q4_1", "MXFP4", "NVFP4"), 5),
    "Q5_0": 5.5,
    "Q8_0": 8.5,
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS"), 4.375),
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S"), 4.625),
    "Q5_1": 6,
    "Q2_K": 2.625,
    "Q3_K": 3.5625,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
}
"""Bits of a weight in tiles, with its scales and minima."""


@pytest.mark.parametrize("name", TYPES)
def test_native_runs_the_codes(source: Path, tmp_path: Path, name: str) -> None:
    path = written(source, tmp_path / "m.gguf", name)
    wanted = PagedRunner(path).logits(IDS)
    found = PagedRunner(path, native()).logits(IDS)
    assert np.isfinite(wanted).all()
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
    np.testing.assert_array_equal(PagedRunner(path, native()).logits(IDS, 3), found)
    on_torch = TorchBackend(BackendOptions(num_threads=1))
    near = PagedRunner(path, on_torch).logits(IDS)
    np.testing.assert_allclose(near, wanted, rtol=0, atol=3e-5 * abs(wanted).max())


@pytest.mark.parametrize("name", TYPES)
def test_tiles_take_the_bits_of_their_codes(source: Path, tmp_path: Path, name: str) -> None:
    """The footprint, known from headers, is the memory taken, and no type is a copy in
    floats.
    """
    checkpoint = open_checkpoint(written(source, tmp_path / "m.gguf", name))
    program = build_programs(checkpoint.config)["decoder"]
    format_of = loaded_formats(checkpoint, "auto", None, program)
    backend = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    footprint = backend.footprint(program, format_of).weight_bytes
    prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
    assert sum(footprint.values()) == prepared.weight_bytes
    down = next(weight for weight in footprint if weight.name.endswith("down_proj.weight"))
    assert footprint[down] * 8 == BITS[name] * down.shape[0] * down.shape[1]
