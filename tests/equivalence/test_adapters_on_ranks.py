"""Adapters of a model that several processes share out: ranks and stages give the bits of one, also
where adapters come and go.

Bitwise: tokens and logprobs; on torch with batch invariance.
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, LoRARequest, SamplingParams
from octavo.api.errors import ConfigError
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.peft_adapters import save_adapter
from tests.support.tiny_models import tiny_model

LAYERS = {"num_hidden_layers": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = prompts_of(20, 33, 47, 18, 5, 40)
LORA = {"enable_lora": True, "max_loras": 2, "dtype": "float32"}
KINDS = {
    "all": {"r": 3, "lora_alpha": 6},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "ends": {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"],
    },
}
RANKS = {
    "native": {"backend": "native"},
    "torch": {"backend": "torch", "device": "cpu", "batch_invariant": True},
}


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def family(request):
    """Families with a head of its own, and with one tied to the embedding."""
    return request.param


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, family):
    """An adapter for each of six prompts, more than have slots, and none for one of them."""
    tiny, folder = tiny_model(family, **LAYERS), tmp_path_factory.mktemp("adapters")
    found = []
    for number, (name, config) in enumerate(KINDS.items(), 1):
        if family == "qwen2" and name == "ends":
            config = config | {"target_modules": ["embed_tokens", "v_proj", "down_proj"]}
        path = save_adapter(tiny, folder / name, seed=number, **config)
        found.append(LoRARequest(name, number, str(path)))
    return [*found, None, found[0], found[2]]


def shared_out(family: str, **options: Any) -> LLM:
    return make_llm(model_path=tiny_model(family, **LAYERS).path, **LORA | options)


def generate(llm: LLM, adapters, params: SamplingParams = GREEDY):
    found = llm.generate(PROMPTS, params, lora_request=adapters, use_tqdm=False)
    assert [output.error for output in found] == [None] * len(found)
    return found


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("native", "auto"), ("native", "int8"), pytest.param("torch", "int8", marks=pytest.mark.slow)],
)
def test_two_ranks_give_the_bits_of_one(family, adapters, backend, dtype):
    """Each adapter changes the answers, and slots change hands between requests. In int8 the codes
    of a part are those of the whole.
    """
    options = {"lora_dtype": dtype, **RANKS[backend]}
    with shared_out(family, **options) as llm:
        wanted = list(map(fingerprint, generate(llm, adapters)))
        plain = list(map(fingerprint, generate(llm, [None] * len(PROMPTS))))
    with shared_out(family, tensor_parallel_size=2, **options) as llm:
        for _ in range(2):
            assert list(map(fingerprint, generate(llm, adapters))) == wanted
        assert list(map(fingerprint, generate(llm, [None] * len(PROMPTS)))) == plain
    changed = [one != other for one, other in zip(wanted, plain, strict=True)]
    assert changed == [adapter is not None for adapter in adapters]


def test_a_row_on_two_ranks_depends_on_its_own_adapter_alone(family, adapters):
    """Tokens and logprobs are bitwise the same in a batch and one after another."""
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
    options = {"backend": "native", "tensor_parallel_size": 2, "enable_prefix_caching": False}
    with shared_out(family, **options) as llm:
        together = generate(llm, adapters, sampled)
        alone = [
            llm.generate([prompt], sampled, lora_request=[adapter], use_tqdm=False)[0]
            for prompt, adapter in zip(PROMPTS, adapters, strict=True)
        ]
    assert list(map(fingerprint, together)) == list(map(fingerprint, alone))


def test_stages_give_the_bits_of_one_process(family, adapters):
    found = []
    for num_stages in (1, 2):
        with shared_out(family, backend="native", pipeline_parallel_size=num_stages) as llm:
            found.append([list(map(fingerprint, generate(llm, adapters))) for _ in range(2)])
    assert found[0] == found[1]


def test_adapters_beside_shared_experts_are_refused():
    with pytest.raises(ConfigError, match="enable_lora: not supported with expert_parallel_size 2"):
        make_llm("qwen2_moe", backend="native", enable_lora=True, expert_parallel_size=2)
