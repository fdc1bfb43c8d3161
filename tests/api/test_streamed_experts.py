"""Experts read from a file when a router chooses them: the resident engine's bits, the experts used
most often stay in memory, and what is refused before anything is loaded.
"""

from __future__ import annotations

import pytest

from octavo.api.errors import ConfigError
from tests.support.llm_tools import GREEDY, SAMPLED, make_llm, prompts_of
from tests.support.native_harness import require_native
from tests.support.streamed_models import least_bytes, results, streamed
from tests.support.tiny_models import tiny_model

PROMPTS = prompts_of(5, 40, 90)
PARAMS = [GREEDY, SAMPLED, GREEDY]
EXPERTS = {"weights_schedule": "experts"}
SPARSE = {"ffn_sparsity": "exact", "quantization": "int8"}


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("qwen3_moe", {"quantization": "int8", "threads": 2}),
    ],
)
def test_experts_in_a_file_give_the_resident_engines_bits(family, options, tmp_path):
    with make_llm(model_path=tiny_model(family).path, backend="native", **options) as llm:
        expected = results(llm, PROMPTS, PARAMS)
    options |= EXPERTS
    least = least_bytes(tmp_path, family, "the experts of one layer", **options)
    for memory in (least, least + 40_000, 1 << 40):
        with streamed(tmp_path, memory, family, **options) as llm:
            assert results(llm, PROMPTS, PARAMS) == expected
            weights = llm.get_metrics().weights
            assert weights.experts_found + weights.experts_read > 0
    assert len(list(tmp_path.glob("*.weights"))) == 1, "the memory is not part of the file"


def test_experts_are_read_once_if_there_is_room(tmp_path):
    with streamed(tmp_path, 1 << 40, "qwen3_moe", **EXPERTS) as llm:
        llm.generate(PROMPTS, GREEDY)
        before = llm.get_metrics().weights
        llm.generate(PROMPTS, GREEDY)
        after = llm.get_metrics().weights
        assert after.experts_read == before.experts_read
        assert after.num_bytes == before.num_bytes and after.experts_found > before.experts_found


def test_a_dense_model_has_no_experts(tmp_path):
    with pytest.raises(ConfigError, match="experts requires a mixture of experts"):
        streamed(tmp_path, 1 << 30, **EXPERTS)


def test_experts_are_not_streamed_beside_layers_computed_neuron_by_neuron(tmp_path):
    path = tiny_model("deepseek_v3", hidden_act="relu").path
    with pytest.raises(ConfigError, match="got experts with options that compute some layers"):
        streamed(
            tmp_path, 1 << 30, model_path=path, neuron_cache_bytes=1 << 23, **SPARSE, **EXPERTS
        )
