"""Whole models with Triton's kernels, in its interpreter, against the reference backend: plain and
packed weights, chunks, padding.

In fp32 within 3e-5 of the largest logit, as plain torch is.
"""

import numpy as np
import pytest
import torch

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.executor.torch.triton.device import DEVICE
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

torch.set_num_threads(1)

BOUND = 3e-5
HALF_BOUND = 0.06


def triton_runner(path, load=None, dtype="auto"):
    return PagedRunner(
        path,
        TorchBackend(
            BackendOptions(num_threads=1, torch_kernels="triton", dtype=dtype), DEVICE.type
        ),
        load=load,
        padding=2,
    )


def tokens(tiny, length=24):
    return np.random.default_rng(1).integers(0, tiny.config["vocab_size"], length)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "gpt_oss", "gemma3_text", "gpt2"])
def test_families(family):
    tiny = tiny_model(family)
    wanted = PagedRunner(tiny.path).logits(tokens(tiny))
    found = triton_runner(tiny.path).logits(tokens(tiny), 11)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=BOUND * abs(wanted).max())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bf16(family):
    tiny = tiny_model(family)
    load = WeightReader(open_checkpoint(tiny.path), "bfloat16").load
    wanted = PagedRunner(tiny.path, load=load).logits(tokens(tiny))
    found = triton_runner(tiny.path, load, "bfloat16").logits(tokens(tiny), 11)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < HALF_BOUND * abs(wanted).max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_packed_weights(quantization):
    """Steps of up to 16 rows take the packed product, longer ones unpack the weight."""
    path = tiny_model("llama", hidden_size=64, intermediate_size=96).path
    checkpoint = open_checkpoint(path)
    load = WeightReader(
        checkpoint, "auto", quantization, build_programs(checkpoint.config)["decoder"]
    ).load
    ids = np.random.default_rng(1).integers(0, 320, 28)
    wanted = PagedRunner(path, load=load).logits(ids)
    for chunk in (9, 28):
        np.testing.assert_allclose(
            triton_runner(path, load).logits(ids, chunk),
            wanted,
            rtol=0,
            atol=BOUND * abs(wanted).max(),
        )


def test_packed_experts():
    path = tiny_model(
        "qwen2_moe",
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ).path
    checkpoint = open_checkpoint(path)
    load = WeightReader(
        checkpoint, "auto", "int4", build_programs(checkpoint.config)["decoder"]
    ).load
    ids = np.random.default_rng(1).integers(0, 264, 16)
    wanted = PagedRunner(path, load=load).logits(ids)
    np.testing.assert_allclose(
        triton_runner(path, load).logits(ids), wanted, rtol=0, atol=BOUND * abs(wanted).max()
    )
