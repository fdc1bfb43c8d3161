"""Adapters through LLM: what a request computes is its adapter's content's, whatever its company,
its slot and what was cached before.
"""

import asyncio
import os

import numpy as np
import pytest

from octavo import LoRARequest, SamplingParams
from octavo.api.errors import ConfigError, InvalidRequest
from octavo.worker.lora.adapter_store import AdapterStore
from tests.support.backend_choice import chosen_backend
from tests.support.llm_tools import fingerprint, make_async, make_llm
from tests.support.peft_adapters import peft_logits, save_adapter
from tests.support.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 17, 3, 99, 42, 150, 7, 8, 23, 60, 11, 200, 31, 77, 2, 9, 120, 18]}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Returns four adapters of different ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(
            f"a{seed}",
            seed + 1,
            str(
                save_adapter(
                    tiny_model("llama"),
                    folder / f"a{seed}",
                    seed=seed,
                    r=2 + 3 * seed,
                    lora_alpha=6,
                )
            ),
        )
        for seed in range(4)
    ]


@pytest.fixture(scope="module")
def llm():
    with make_llm(enable_lora=True, max_loras=4, backend=chosen_backend("native")) as made:
        yield made


def generate(llm, *adapters, prompt=PROMPT):
    found = llm.generate(
        [prompt] * len(adapters), GREEDY, lora_request=list(adapters), use_tqdm=False
    )
    assert [output.error for output in found] == [None] * len(found)
    return found


def test_tokens_are_those_of_peft(llm, adapters):
    """Greedy tokens are the best of PEFT's logits, computed in float64."""
    (output,) = generate(llm, adapters[1])
    assert output.lora_request is adapters[1]
    tokens = output.outputs[0].token_ids
    logits = peft_logits(
        tiny_model("llama"), adapters[1].lora_path, [*PROMPT["prompt_token_ids"], *tokens]
    )
    assert tokens == np.argmax(logits, axis=1)[len(PROMPT["prompt_token_ids"]) - 1 : -1].tolist()


def test_company_changes_nothing(llm, adapters):
    """Requests of four adapters and of none give bitwise what each gives alone."""
    mixed = [None, *adapters, adapters[0], None]
    together = [fingerprint(output) for output in generate(llm, *mixed)]
    llm.reset_prefix_cache()
    alone = []
    for adapter in mixed:
        alone.append(fingerprint(generate(llm, adapter)[0]))
        llm.reset_prefix_cache()
    assert together == alone
    assert len({repr(one) for one in together}) == 5


def test_evicted_adapters_come_back_the_same(adapters):
    """Requests of four adapters wait for the one slot that there is, and get what they would get
    with four.
    """
    with make_llm(enable_lora=True, max_loras=4) as wide:
        wanted = [fingerprint(output) for output in generate(wide, *adapters)]
    with make_llm(enable_lora=True, max_loras=1, max_num_seqs=3) as narrow:
        for _ in range(2):
            order = [*adapters, None, *adapters[::-1]]
            found = [fingerprint(output) for output in generate(narrow, *order)]
            assert found[:4] == wanted
            assert found[5:] == wanted[::-1]


@pytest.mark.parametrize(("max_cpu_loras", "num_reads"), [(None, 7), (2, 4), (3, 3)])
def test_host_memory_keeps_as_many_as_asked(adapters, monkeypatch, max_cpu_loras, num_reads):
    """One slot, and three adapters by turns: those that host memory keeps are not read again."""
    reads = []
    store = AdapterStore.__init__

    def counting(self, read, slots, max_kept):
        store(self, lambda path: reads.append(path) or read(path), slots, max_kept)

    monkeypatch.setattr(AdapterStore, "__init__", counting)
    options = {} if max_cpu_loras is None else {"max_cpu_loras": max_cpu_loras}
    first, second, third, _ = adapters
    with make_llm(enable_lora=True, max_loras=1, **options) as llm:
        found = {}
        for adapter in (first, second, first, second, third, second, first):
            tokens = fingerprint(generate(llm, adapter)[0])
            assert found.setdefault(adapter.lora_name, tokens) == tokens
            llm.reset_prefix_cache()
    assert len(reads) == num_reads


def test_a_cached_prefix_is_one_adapters(llm, adapters):
    """A prompt's blocks are found again under the same content alone, by whatever name."""
    llm.reset_prefix_cache()
    first, second = adapters[:2]
    assert generate(llm, first)[0].num_cached_tokens == 0
    assert generate(llm, second)[0].num_cached_tokens == 0
    assert generate(llm, None)[0].num_cached_tokens == 0
    other_name = LoRARequest("other", 9, first.lora_path)
    assert generate(llm, other_name)[0].num_cached_tokens == 16


def test_new_weights_under_an_old_name_hit_nothing_old(llm, adapters, tmp_path):
    """The same name and folder with new weights is another adapter, with what it says."""
    tiny = tiny_model("llama")
    named = LoRARequest("mine", 5, str(save_adapter(tiny, tmp_path, seed=1, r=5, lora_alpha=6)))
    before = fingerprint(generate(llm, named)[0])
    assert before == fingerprint(generate(llm, adapters[1])[0])
    save_adapter(tiny, tmp_path, seed=2, r=8, lora_alpha=6)
    os.utime(tmp_path / "adapter_model.safetensors")
    after = generate(llm, named)[0]
    assert after.num_cached_tokens == 0
    assert fingerprint(after) == fingerprint(generate(llm, adapters[2])[0])


def test_files_that_change_after_they_were_named_fail_that_request_alone(adapters, tmp_path):
    """Requests whose adapter was written over before it was read fail by name; others go on."""
    tiny = tiny_model("llama")
    path = save_adapter(tiny, tmp_path, seed=7, r=3, lora_alpha=6)

    async def go() -> None:
        llm = make_async(enable_lora=True)
        known = llm.adapter(adapters[0])
        changed = llm.adapter(LoRARequest("mine", 5, str(path)))
        save_adapter(tiny, path, seed=8, r=3, lora_alpha=6)
        streams = [llm.submit(PROMPT, GREEDY, adapter=one) for one in (changed, known, changed)]
        first, other, again = [await stream.final() for stream in streams]
        llm.close()
        assert "mine could not be loaded" in first.error
        assert "have changed" in again.error
        assert other.error is None

    asyncio.run(go())


def test_samples_and_beams_have_their_adapter(llm, adapters):
    """Every sample of a request, and every beam, is computed with its adapter."""
    params = SamplingParams(n=3, temperature=1, seed=3, max_tokens=5, logprobs=1, ignore_eos=True)
    (several,) = llm.generate(PROMPT, params, lora_request=adapters[2], use_tqdm=False)
    (plain,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert fingerprint(several) != fingerprint(plain)
    beams = SamplingParams(beam_width=2, max_tokens=4, temperature=0, ignore_eos=True)
    (one,) = llm.generate(PROMPT, beams, lora_request=adapters[2], use_tqdm=False)
    (other,) = llm.generate(PROMPT, beams, use_tqdm=False)
    assert one.outputs[0].cumulative_logprob != other.outputs[0].cumulative_logprob


@pytest.mark.parametrize(
    ("lora_request", "message"),
    [
        (LoRARequest("gone", 1, "/nowhere/at/all"), "lora_path: .*not an adapter"),
        ("a name", "lora_request: got 'a name', expected a LoRARequest"),
        ([None, None], "lora_request: got 2, expected one"),
    ],
)
def test_bad_adapters_are_refused_before_anything_runs(llm, lora_request, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(PROMPT, GREEDY, lora_request=lora_request, use_tqdm=False)


def test_an_engine_without_adapters_says_how_to_get_them(adapters):
    with make_llm() as plain, pytest.raises(InvalidRequest, match="LoRA is disabled") as refused:
        plain.generate(PROMPT, GREEDY, lora_request=adapters[0], use_tqdm=False)
    assert "enable_lora" in refused.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lora_rank": 2000}, "max_lora_rank: got 2000, expected at most 1024"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras: got 2, expected at least"),
        ({"max_loras": 0}, "max_loras: got 0"),
        (
            {"expert_parallel_size": 2, "backend": "native"},
            "enable_lora: not supported with expert_parallel_size 2",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(enable_lora=True, **options)


@pytest.mark.parametrize("arguments", [("", 1, "x"), ("x", 0, "x"), ("x", 1, ""), ("x", True, "x")])
def test_a_lora_request_is_checked_when_it_is_made(arguments):
    with pytest.raises(InvalidRequest, match="expected"):
        LoRARequest(*arguments)
