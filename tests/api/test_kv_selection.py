"""Keys that generated tokens choose: a request's bits never depend on its company, a budget of all
is the engine that chooses none, prompts are computed whole, what is chosen is what the reference
chooses, and what cannot choose is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from octavo import LLM
from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.executor.reference.attention import chosen_blocks
from octavo.models.registry import build_programs
from octavo.program.key_selection import KeySelection
from octavo.program.ops import Attention
from octavo.sparsity.passes.select_keys import GROUP, select_keys
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.native_harness import require_native
from tests.support.sparse_rows import alone_and_together, whole_prompts
from tests.support.tiny_models import tiny_model

PROMPTS = prompts_of(5, 190, 133, 70)
PARAMS = [
    msgspec.structs.replace(GREEDY, max_tokens=20),
    SAMPLED,
    PENALISED,
    msgspec.structs.replace(SAMPLED, n=2),
]
LAYERS = 5


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def engine(budget: float | None, **options: Any) -> LLM:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    chosen = {} if budget is None else {"kv_selection": "speculated", "kv_budget": budget}
    return make_llm(model_path=model.path, **{"backend": "native"} | chosen | options)


def results(llm: LLM) -> list[Any]:
    return alone_and_together(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "bf16", "int8"])
def test_a_row_alone_is_a_row_in_company(kv_cache_dtype):
    options = {"kv_cache_dtype": kv_cache_dtype}
    with engine(0.3, **options) as llm:
        expected = results(llm)
    assert expected[:4] == expected[4:]
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 7, "threads": 3},
        {"num_scheduler_steps": 1, "enable_prefix_caching": False},
        {"kv_cache": False},
        {"spec_method": "ngram"},
    ]
    for way in ways if kv_cache_dtype == "bf16" else ways[:1]:
        with engine(0.3, **options, **way) as llm:
            assert results(llm) == expected, way


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_goes_on_as_it_would_have(mode):
    long = msgspec.structs.replace(SAMPLED, max_tokens=60, ignore_eos=True)
    with engine(0.3, preemption_mode=mode) as llm:
        expected = [fingerprint(llm.generate(prompt, long)[0]) for prompt in PROMPTS]
        block_bytes = (64 << 20) // (llm.info.kv_capacity_tokens // 16)
    small = 20 * block_bytes
    with engine(0.3, preemption_mode=mode, kv_cache_memory_bytes=small) as llm:
        outputs = llm.generate(PROMPTS, [long] * len(PROMPTS))
        assert llm.get_metrics().num_preemptions > 0
    assert [fingerprint(output) for output in outputs] == expected


def test_all_keys_are_the_engine_that_chooses_none():
    with engine(None) as llm:
        expected = results(llm)
    with engine(1.0) as llm:
        assert results(llm) == expected
    with engine(0.3) as llm:
        assert results(llm) != expected


def test_prompts_are_computed_whole():
    pairs = whole_prompts(lambda: engine(None), lambda: engine(0.3), PROMPTS)
    one, other = pairs[1]
    assert one.outputs[0].logprobs[1] != other.outputs[0].logprobs[1]


def test_native_chooses_what_the_reference_does():
    """Both choose by the same scores within rounding, in fp32."""
    found = []
    for backend in ("native", "reference"):
        with engine(0.3, backend=backend, dtype="float32", kv_cache_dtype="fp32") as llm:
            outputs = llm.generate(PROMPTS, msgspec.structs.replace(GREEDY, max_tokens=6))
        found.append(
            [
                [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
                for output in outputs
            ]
        )
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() < 1e-4


def test_blocks_are_chosen_by_their_share():
    masses = np.array([0.0, 0.1, 0.5, 0.2, 0.5, 0.0, 0.0, 0.01, 0.0, 0.0])
    selection = KeySelection(GROUP, 0, 0.5)
    assert chosen_blocks(masses, selection).tolist() == [0, 2, 4, 8, 9]
    assert chosen_blocks(masses[:4], selection).tolist() == [0, 1, 2, 3]
    assert selection.num_blocks(3) == 3 and selection.num_blocks(100) == 50


def test_the_first_layers_stay_whole():
    config = tiny_model("llama", num_hidden_layers=LAYERS).config
    program = select_keys(build_programs(config)["decoder"], 0.3)
    chosen = [op.selection for op in program.ops if isinstance(op, Attention)]
    assert [each is not None for each in chosen] == [False, False, True, True, True]
    group = program.group(GROUP)
    assert (group.num_layers, group.v_width) == (3, 0)
    assert 0 < group.k_width < program.group("full").k_width / 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"backend": "torch"}, "kv_selection: requires the native or reference"),
    "ranks": ({"tensor_parallel_size": 2}, "kv_selection: requires tensor_parallel_size 1"),
    "stages": ({"pipeline_parallel_size": 2}, "not supported with kv_selection"),
    "adapters": ({"enable_lora": True}, "kv_selection: not supported with enable_lora"),
    "too few": ({"kv_budget": 0.01}, "kv_budget: got 0.01, expected 0.05 to 1"),
    "a budget alone": ({"kv_selection": None}, "kv_budget: requires kv_selection"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_go_together_are_refused(case):
    options, message = REFUSED[case]
    with pytest.raises((ConfigError, BackendUnavailable)) as caught:
        engine(0.4, **options)
    assert message in str(caught.value)


FAMILIES = {
    "opt": "its queries are not rotated by one position, in halves",
    "qwen3": "its queries are normed or bounded before they turn",
    "deepseek_v3": "it keeps latents",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_cannot_choose_are_refused_by_name(family):
    model = tiny_model(family, num_hidden_layers=4)
    with pytest.raises(ConfigError, match="not supported by") as caught:
        make_llm(model_path=model.path, backend="native", kv_selection="speculated")
    assert FAMILIES[family] in str(caught.value)
