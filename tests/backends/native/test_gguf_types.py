"""Every type of GGUF's blocks on native, as codes: near the reference, chunked as whole; and those
that it refuses by name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.backends.base import BackendOptions
from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.checkpoint.gguf import read_gguf
from octavo.checkpoint.writing.gguf_file import GgufWriter
from octavo.errors import UnsupportedModel
from octavo.quant.gguf import BLOCK_TYPES, BlockType
from tests.quant.test_gguf import HALVES, random_blocks
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_gguf import SHAPE, write_tiny_gguf

WIDTHS = {"hidden_size": 256, "intermediate_size": 256}
IDS = np.random.default_rng(2).integers(0, 90, 30)
NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
TYPES = [name for name, number in NUMBERS.items() if BLOCK_TYPES[number].dtype is None]
REFUSED = ("Q2_K",)
"""Types of groups of 16 with minima, for which native has no tiles."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("name", [name for name in TYPES if name not in REFUSED])
def test_native_runs_the_codes(source: Path, tmp_path: Path, name: str) -> None:
    path = written(source, tmp_path / "m.gguf", name)
    wanted = PagedRunner(path).logits(IDS)
    found = PagedRunner(path, native()).logits(IDS)
    assert np.isfinite(wanted).all()
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
    np.testing.assert_array_equal(PagedRunner(path, native()).logits(IDS, 3), found)


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_only_torch_reads(source: Path, tmp_path: Path, name: str) -> None:
    path = written(source, tmp_path / "m.gguf", name)
    with pytest.raises(UnsupportedModel, match=f"is stored as {name}"):
        PagedRunner(path, native())
    wanted = PagedRunner(path).logits(IDS)
    found = PagedRunner(path, TorchBackend(BackendOptions(num_threads=1))).logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())
