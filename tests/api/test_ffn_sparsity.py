"""Products that skip zero inputs: the same bits as products that read every weight, alone and in
company, and a refusal where nothing can be skipped.
"""

from __future__ import annotations

import re

import pytest

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.executor.native.extension import supported_levels
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.native_harness import require_native
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import tiny_model

PARAMS = [GREEDY, SAMPLED, PENALISED]
PROMPTS = prompts_of(5, 40, 33)
MODELS = {
    "opt": {},
    "nemotron": {"hidden_act": "relu2"},
    "llama": {"hidden_act": "relu"},
}
"""Families with a plain relu, a squared one, and a gate of relu."""

PRECISIONS = ({}, {"dtype": "bfloat16", "cpu_level": "portable"}, {"quantization": "int8"})


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def sparse(family: str, **options):
    path = tiny_model(family, **MODELS[family]).path
    return make_llm(model_path=path, backend="native", **options)


def results(llm) -> list:
    """Returns the results of each prompt alone, then of two together, then of all."""
    return [
        fingerprint(output)
        for some in ([0], [1], [2], [0, 1], [0, 1, 2])
        for output in llm.generate([PROMPTS[i] for i in some], [PARAMS[i] for i in some])
    ]


@pytest.mark.parametrize("precision", PRECISIONS, ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("family", MODELS)
def test_skipping_zeros_changes_no_bit(family, precision):
    with sparse(family, **precision) as llm:
        expected = results(llm)
    for more in ({}, {"threads": 2}):
        with sparse(family, ffn_sparsity="exact", **precision, **more) as llm:
            assert results(llm) == expected


def test_an_activation_without_zeros_is_refused():
    path = tiny_model("llama").path
    message = r"exact requires feed-forward layers with the activation relu or relu2, \S+ has silu"
    with pytest.raises(ConfigError, match=message):
        make_llm(model_path=path, backend="native", ffn_sparsity="exact")


def test_weights_that_share_scales_are_refused():
    message = r"stored as i8, .* with cpu_level \S+, got u4 for .*\nhint: set quantization"
    with pytest.raises(BackendUnavailable, match=message):
        make_llm(
            model_path=tiny_model("llama", hidden_act="relu", **WIDTHS_OF_32["llama"]).path,
            backend="native",
            ffn_sparsity="exact",
            quantization="int4",
        )


@pytest.mark.skipif("amx" not in supported_levels(), reason="this machine has no AMX")
def test_bf16_on_the_tile_unit_is_refused():
    with pytest.raises(BackendUnavailable, match="cpu_level amx, got bf16"):
        sparse("opt", ffn_sparsity="exact", dtype="bfloat16")


def test_other_backends_are_refused():
    message = "ffn_sparsity: requires the native backend, got 'reference'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm("opt", ffn_sparsity="exact")
