"""A fault while a request is computed ends that request alone: its neighbours' bits, the blocks and
the engine stay sound.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.executor.native.backend import NativeProgram
from octavo.executor.reference.backend import ReferenceRunnable
from octavo.executor.torch.program import TorchProgram
from octavo.worker.worker import Worker
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    alone,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.tiny_models import tiny_model

MakeError = Callable[[], Exception]

BAD = 240
"""Token whose embedding is NaN, or whose presence in a step raises; it is in none of the prompts,
and never drawn.
"""

PARAMS = [
    msgspec.structs.replace(params, logit_bias={BAD: -100.0})
    for params in (GREEDY, SAMPLED, PENALISED)
]
PROMPTS = prompts_of(5, 40, 33)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2"])
def poisoned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its output layer apart from its embeddings, in which BAD is NaN."""
    path = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(
        tiny_model(request.param, tie_word_embeddings=False).path, path, dirs_exist_ok=True
    )
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight")))
    weights[name][BAD] = np.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(params=["auto", "bfloat16", "int8"])
def make(request: pytest.FixtureRequest, poisoned: Path, backend: str) -> Callable[..., LLM]:
    """Maker of engines over the poisoned model, in each of three precisions."""
    precision = {"quantization": "int8"} if request.param == "int8" else {"dtype": request.param}
    return lambda **options: make_llm(model_path=poisoned, backend=backend, **precision, **options)


def expected_of(llm: LLM) -> list[Any]:
    return [alone(llm, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def poison(prompt: list[int], place: int) -> list[int]:
    return [*prompt[:place], BAD, *prompt[place:]]


def test_nan_fails_its_own_request(make: Callable[..., LLM]) -> None:
    with make() as llm:
        expected = expected_of(llm)
        bad = [poison(PROMPTS[1], place) for place in (0, 20, 40)]
        outputs = llm.generate([*bad, *PROMPTS], PARAMS * 2)
        for failed in outputs[:3]:
            assert failed.finished and "are NaN" in failed.error
            assert [(sample.finish_reason, sample.token_ids) for sample in failed.outputs] == [
                ("error", [])
            ]
        assert [fingerprint(output) for output in outputs[3:]] == expected
        assert llm.get_metrics().num_used_blocks == 0
        scored = llm.generate(bad[1], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        assert "within the prompt are NaN" in scored.error


def test_nan_in_the_midst_of_an_answer(make: Callable[..., LLM]) -> None:
    """A request whose only allowed token is the bad one fails once, though all its n samples do,
    each after one token.
    """
    says_bad = SamplingParams(
        temperature=1, seed=1, max_tokens=8, n=3, allowed_token_ids=[BAD], ignore_eos=True
    )
    with make() as llm:
        expected = expected_of(llm)
        failed, *outputs = llm.generate([PROMPTS[1], *PROMPTS], [says_bad, *PARAMS])
        assert "NaN" in failed.error
        assert [(sample.finish_reason, sample.token_ids) for sample in failed.outputs] == [
            ("error", [BAD])
        ] * 3
        assert [fingerprint(output) for output in outputs] == expected


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("budget", [2048, 16])
def test_what_a_failed_request_wrote_reaches_nobody(make: Callable[..., LLM], budget: int) -> None:
    """NaN reaches others neither through the prefix cache nor from reused blocks, which still hold
    NaN behind a request's last token.
    """
    bad = poison(PROMPTS[1], 32)
    with make() as llm:
        expected = expected_of(llm)
    with make(
        max_model_len=64,
        kv_cache_memory_bytes=bytes_of_blocks(make, 6),
        max_num_batched_tokens=budget,
    ) as llm:
        for _ in range(3):
            for failed in llm.generate([bad, poison(PROMPTS[2], 1)], GREEDY):
                assert failed.error is not None and failed.num_cached_tokens == 0
            for prompt, params, wanted in zip(PROMPTS, PARAMS, expected, strict=True):
                assert fingerprint(llm.generate(prompt, params)[0]) == wanted
            assert llm.reset_prefix_cache()


def bytes_of_blocks(make: Callable[..., LLM], num_blocks: int) -> int:
    """Counts the blocks of every group, with a cache so small that no window's cap counts."""
    with make(kv_cache_memory_bytes=1 << 20) as llm:
        return (1 << 20) // (llm.info.kv_capacity_tokens // 16) * num_blocks


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[MakeError], None]:
    """Lets every step that computes BAD raise, after it has written its KV. The error is made each
    time: a raised one keeps its frames alive.
    """

    def break_with(error: MakeError) -> None:
        for kind in (NativeProgram, ReferenceRunnable, TorchProgram):
            monkeypatch.setattr(kind, "run", _raising(kind.run, error))

    return break_with


def _raising(run: Callable[..., Any], error: MakeError) -> Callable[..., Any]:
    def run_or_raise(self: Any, batch: Any, kv: Any, verify: Any = None) -> Any:
        output = run(self, batch, kv, verify)
        if BAD in batch.token_ids:
            raise error()
        return output

    return run_or_raise


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: RuntimeError("kernel fault"), "the step failed: RuntimeError: kernel fault"),
        (MemoryError, "the step ran out of memory"),
    ],
    ids=["fault", "memory"],
)
def test_an_exception_within_a_step_fails_the_request_that_raises_it(
    backend: str, broken: Any, error: MakeError, message: str
) -> None:
    with make_llm(backend=backend) as llm:
        expected = expected_of(llm)
        assert llm.reset_prefix_cache()
        broken(error)
        outputs = llm.generate([poison(PROMPTS[1], 20), *PROMPTS], [GREEDY, *PARAMS])
        assert outputs[0].error == message
        assert [fingerprint(output) for output in outputs[1:]] == expected
        again = llm.generate(
            [poison(PROMPTS[1], 20), *PROMPTS], [msgspec.structs.replace(SAMPLED, n=3), *PARAMS]
        )
        assert again[0].error == message and again[0].num_cached_tokens == 0
        assert [fingerprint(output) for output in again[1:]] == expected
        assert [output.num_cached_tokens for output in again[1:]] == [0, 32, 32]
        assert llm.get_metrics().num_used_blocks == 0 and llm.reset_prefix_cache()


def test_an_exception_outside_of_the_rows_fails_the_step_and_not_the_engine(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(backend=backend) as llm:
        expected = expected_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "execute", lambda self, plan: 1 / 0)
            outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.error for output in outputs] == [
            "the step failed: ZeroDivisionError: division by zero"
        ] * 3
        assert llm.get_metrics().num_used_blocks == 0
        assert expected_of(llm) == expected


def test_bans_that_leave_no_token_fail_the_request(backend: str) -> None:
    banned = SamplingParams(temperature=0, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3)
    with make_llm(backend=backend) as llm:
        expected = expected_of(llm)
        failed, *outputs = llm.generate([PROMPTS[0], *PROMPTS], [banned, *PARAMS])
        assert failed.error.startswith(
            "no token can be sampled after 5 tokens: the grammar, logits_processors,"
            " allowed_token_ids, logit_bias, bad_words and min_tokens exclude every token"
        )
        assert [fingerprint(output) for output in outputs] == expected
