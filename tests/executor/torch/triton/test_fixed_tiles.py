"""Kernels with fixed tiles instead of rows computed alone: whole models, bitwise the same in
chunks, alone and in company.

In Triton's interpreter this holds for models whose widths are multiples of 16, where PyTorch's
loops over elements leave no tails.
"""

import numpy as np
import pytest
import torch

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.invariant import kernels_suffice
from octavo.executor.torch.plain import PlainKernels
from octavo.executor.torch.triton.kernels import TritonKernels
from octavo.models.registry import build_programs
from tests.executor.torch.triton.device import DEVICE
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

torch.set_num_threads(1)

EVEN = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "qwen2_moe": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
}


def fixed_runner(path, load=None, dtype="auto", seed=0):
    options = BackendOptions(
        num_threads=1,
        torch_kernels="triton",
        attention_backend="triton",
        batch_invariant=True,
        dtype=dtype,
    )
    return PagedRunner(path, TorchBackend(options, DEVICE.type), load=load, padding=seed, seed=seed)


@pytest.fixture
def whole_steps(monkeypatch):
    """Computes whole steps on the interpreter too, as a GPU with these kernels does."""
    monkeypatch.setattr("octavo.executor.torch.backend.kernels_suffice", lambda *_: True)


@pytest.mark.usefixtures("whole_steps")
@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [("llama", "bfloat16", None), ("qwen2_moe", "float32", "int4")],
)
def test_rows_are_bitwise_the_same(family, dtype, quantization):
    path = tiny_model(family, **EVEN[family]).path
    checkpoint = open_checkpoint(path)
    program = build_programs(checkpoint.config)["decoder"]
    load = WeightReader(checkpoint, dtype, quantization, program if quantization else None).load
    ids = np.random.default_rng(1).integers(0, 260, 24)
    whole = fixed_runner(path, load, dtype).logits(ids)
    np.testing.assert_array_equal(fixed_runner(path, load, dtype, seed=3).logits(ids, 17), whole)
    runner = fixed_runner(path, load, dtype, seed=2)
    mine, other = runner.add(ids), runner.add(ids[::-1].copy())
    found = [
        runner.step([(other, at, at + 8), (mine, at, at + 8)])["logits"][8:]
        for at in range(0, 24, 8)
    ]
    np.testing.assert_array_equal(np.concatenate(found), whole)
    wanted = PagedRunner(path, load=load).logits(ids)
    assert (
        np.sqrt(np.mean((whole - wanted) ** 2))
        < (0.06 if dtype == "bfloat16" else 3e-5) * abs(wanted).max()
    )


class Attention:
    is_invariant = True


def test_when_the_kernels_suffice():
    llama, latent = (
        build_programs(tiny_model(family).config)["decoder"] for family in ("llama", "deepseek_v3")
    )
    fixed, cpu, cuda = (
        TritonKernels(DEVICE, fixed_tiles=True),
        torch.device("cpu"),
        torch.device("cuda"),
    )
    assert kernels_suffice(llama, fixed, Attention(), cuda)
    assert not kernels_suffice(llama, fixed, Attention(), cpu)
    assert not kernels_suffice(latent, fixed, Attention(), cuda)
    assert not kernels_suffice(llama, TritonKernels(DEVICE), Attention(), cuda)
    assert not kernels_suffice(llama, PlainKernels(), Attention(), cuda)
