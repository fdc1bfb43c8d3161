"""LFM2's convolutions: their rows are kept as a window keeps keys. Everything here is bitwise."""

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.api.errors import UnsupportedModel
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

IDS = np.random.default_rng(3).integers(0, 281, 70)
CONV = 1
"""Index of the convolutions' cache group."""


def config(**values):
    return tiny_model("lfm2").config | values


def test_a_prefix_hit_needs_only_the_last_block_of_the_convolutions():
    """A request begins behind 48 tokens of another, whose earlier rows it does not have."""
    runner = PagedRunner(tiny_model("lfm2").path)
    first = runner.add(IDS)
    whole = runner.step([(first, 0, 70)])["logits"]
    second = runner.add(IDS)
    second.blocks[1 - CONV, :3] = first.blocks[1 - CONV, :3]
    second.blocks[CONV, 2] = first.blocks[CONV, 2]
    np.testing.assert_array_equal(runner.step([(second, 48, 70)])["logits"], whole[48:])


@pytest.mark.parametrize("kind", [ReferenceBackend, TorchBackend, NativeBackend])
def test_an_int8_cache_keeps_the_convolutions_rows_in_fp32(kind):
    program = build_programs(config())["decoder"]
    backend = kind(BackendOptions(num_threads=1, kv_cache_dtype="int8"))
    layouts = backend.footprint(program, lambda weight: "F32").kv_layouts
    assert [layout.dtype for layout in layouts] == ["int8", "fp32"]
    assert layouts[CONV].block_bytes == 3 * 16 * 48 * 4


@pytest.mark.parametrize("chunk", [1, 2, 17])
def test_chunks_are_the_whole_over_an_int8_cache(chunk):
    path, options = tiny_model("lfm2").path, BackendOptions(kv_cache_dtype="int8")
    whole = PagedRunner(path, ReferenceBackend(options)).logits(IDS)
    chunked = PagedRunner(path, ReferenceBackend(options), padding=1).logits(IDS, chunk)
    np.testing.assert_array_equal(chunked, whole)


def test_indices_of_attention_layers_are_layer_types():
    indices = config(layer_types=None, full_attn_idxs=[1])
    assert build_programs(indices) == build_programs(config())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["conv"]}, "layer_types is .'conv'., expected 4 entries"),
        ({"layer_types": ["mamba"] * 4}, "from full_attention, conv"),
        ({"layer_types": None, "full_attn_idxs": [4]}, "full_attn_idxs is .4., expected 0 to 3"),
        ({"conv_L_cache": 0}, "conv_L_cache is 0, expected an integer from 1 to 64"),
        ({"conv_dim": 24}, "conv_dim is 24, supported: 48"),
        ({"block_use_swiglu": False}, "block_use_swiglu is False"),
    ],
)
def test_what_is_not_honoured_is_refused(values, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_programs(config(**values))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_goes_on_where_it_was(mode):
    """Twelve blocks hold two of three requests to their ends."""
    prompts = prompts_of(60, 70, 80)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    with make_llm("lfm2") as llm:
        plain = llm.generate(prompts, params)
    few = {"kv_cache_memory_bytes": "300KiB", "max_model_len": 160, "preemption_mode": mode}
    with make_llm("lfm2", **few) as llm:
        found = llm.generate(prompts, params)
        assert llm.get_metrics().num_preemptions > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
