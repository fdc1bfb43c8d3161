"""What a request computes with its adapter is bitwise the same under guesses, preemption and beside
a draft model.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo import LoRARequest, SamplingParams
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.peft_adapters import save_adapter
from tests.support.proposers import (
    all_verified,
    draft_counts,
    seldom_right,
    sequences,
    verified_at_any_cost,
)
from tests.support.tiers import examples
from tests.support.tiny_models import tiny_model

BASE = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
PARAMS = [
    SamplingParams(temperature=0, **BASE),
    SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5, **BASE),
    SamplingParams(temperature=1.0, seed=4, **BASE),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, **BASE),
]
PROMPTS = prompts_of(20, 33, 47, 18)
LORA = {"enable_lora": True, "max_loras": 2}


@pytest.fixture(scope="module", params=["auto", "int8"])
def lora(request):
    """Options of adapters, as exact as their files and not."""
    return LORA | {"lora_dtype": request.param}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters and none, for four prompts."""
    folder = tmp_path_factory.mktemp("adapters")

    def saved(seed):
        path = save_adapter(
            tiny_model("llama"), folder / f"a{seed}", seed=seed, r=2 + 3 * seed, lora_alpha=6
        )
        return LoRARequest(f"a{seed}", seed + 1, str(path))

    first, second = saved(0), saved(1)
    return [first, second, None, first]


def generate(llm, adapters):
    found = llm.generate(PROMPTS, PARAMS, lora_request=adapters, use_tqdm=False)
    assert [output.error for output in found] == [None] * len(found)
    return found


@pytest.fixture(scope="module")
def plain(adapters, lora):
    """Answers of the native backend without guesses, with room for all."""
    with make_llm(backend="native", **lora) as llm:
        return generate(llm, adapters)


def test_under_guesses(adapters, lora, plain):
    guess = seldom_right(sequences(plain, PROMPTS), 3)
    with all_verified(guess), make_llm(backend="native", spec_method="ngram", **lora) as llm:
        found = generate(llm, adapters)
        assert draft_counts(llm)[1] > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


def test_beside_a_draft_model(adapters, lora, plain):
    """The draft model guesses without adapters, and is right now and then."""
    options = {"spec_method": "draft_model", "spec_model": str(tiny_model("llama").path)}
    with verified_at_any_cost(), make_llm(backend="native", **options, **lora) as llm:
        found = generate(llm, adapters)
        assert draft_counts(llm)[1] > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_under_preemption(adapters, lora, plain, mode):
    blocks = 9 * 2 * 2 * 2 * 16 * 16 * 4
    options = {"kv_cache_memory_bytes": blocks, "preemption_mode": mode, "max_model_len": 80}
    once = SamplingParams(temperature=0, max_tokens=1)
    with make_llm(backend="native", **options, **lora) as llm:
        # Requests wait for their adapters: load those first, so that all four start together.
        llm.generate([[5]] * len(adapters), once, lora_request=adapters, use_tqdm=False)
        found = generate(llm, adapters)
        assert llm.get_metrics().num_preemptions > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


def resident_bytes() -> int:
    """Returns the memory that this process has on the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("backend", "sample"), [("native", 100), ("torch", 10)])
def test_memory_stays_flat_under_loads_and_unloads(backend, sample, tmp_path):
    """Adapters that come and go by turns through two slots leave nothing behind."""
    tiny = tiny_model("llama")
    names = [
        LoRARequest(
            f"a{seed}",
            seed + 1,
            str(save_adapter(tiny, tmp_path / f"a{seed}", seed=seed, r=64, lora_alpha=6)),
        )
        for seed in range(4)
    ]
    params = SamplingParams(temperature=0, max_tokens=1)
    with make_llm(backend=backend, enable_lora=True, max_loras=2, max_lora_rank=64) as llm:
        used = []
        for index in range(examples(sample)):
            name = names[index % 4]
            (output,) = llm.generate([[5, 6, 7]], params, lora_request=name, use_tqdm=False)
            assert output.error is None
            used.append(resident_bytes())
    assert used[-1] - max(used[: len(used) // 2]) < 8 << 20


def test_on_torch_in_company_and_alone(adapters):
    """With batch_invariant a row's bits do not depend on the adapters beside it."""
    with make_llm(backend="torch", **LORA) as llm:
        together = generate(llm, adapters)
        llm.reset_prefix_cache()
        for prompt, params, adapter, wanted in zip(
            PROMPTS, PARAMS, adapters, together, strict=True
        ):
            alone = llm.generate([prompt], params, lora_request=adapter, use_tqdm=False)
            assert fingerprint(alone[0]) == fingerprint(wanted)
            llm.reset_prefix_cache()
    assert len({repr(fingerprint(output)) for output in together}) == 4
