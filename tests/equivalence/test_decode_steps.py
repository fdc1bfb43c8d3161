"""Several decode steps in one native call yield bitwise what single steps do, whatever comes and
goes between them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputs
from octavo.engine.clients.ledger import RequestLedger
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.recording.recorder import StepComputed, StepPlanned, read_log
from octavo.engine.recording.replay import Replay
from octavo.engine.scheduler import step_builder
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampling.sample_verifier import SampleVerifier
from tests.support.llm_tools import core_of, fingerprint, make_llm, prompts_of
from tests.support.tiny_tokenizer import tiny_model_with_text

SCARCE = {"llama": "110KiB", "gemma3_text": "144KiB", "gpt2": "176KiB"}
"""Families, and what eight blocks take, or nine."""

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "logprobs": 0},
    {"temperature": 1.3, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 0, "presence_penalty": 1.5},
    {
        "temperature": 1.0,
        "min_tokens": 11,
        "max_tokens": 29,
        "stop_token_ids": list(range(0, 256, 5)),
    },
    {"temperature": 1.0, "stop_token_ids": list(range(0, 256, 9)), "logprobs": 1},
    {
        "temperature": 1.0,
        "logit_bias": {7: 4.0, 9: -100.0},
        "allowed_token_ids": list(range(3, 90)),
    },
    {
        "temperature": 1.0,
        "bad_words_token_ids": [[5], [6, 7]],
        "allowed_token_ids": list(range(4, 12)),
    },
    {
        "temperature": 1.0,
        "dry_multiplier": 2.0,
        "dry_allowed_length": 1,
        "allowed_token_ids": list(range(4, 12)),
    },
    {"temperature": 0.8, "mirostat_mode": 2, "mirostat_tau": 3.0, "logprobs": 1},
    {"temperature": 0.7, "logprob_token_ids": [3, 7, 250], "presence_penalty": 0.5},
    {
        "temperature": 1.0,
        "allowed_token_ids": [4, 5, 6],
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2, "min_pattern_size": 2},
    },
    {"temperature": 1.1, "n": 2},
    {"temperature": 0, "prompt_logprobs": 1},
]


@pytest.fixture(autouse=True)
def steps_of_any_length(monkeypatch):
    """Lets calls last long, so that a loaded machine computes as many steps."""
    monkeypatch.setattr(step_builder, "MAX_CALL_S", 1e9)


def llm_of(family: str, num_steps: int, **options: Any) -> LLM:
    return make_llm(
        family,
        backend="native",
        num_scheduler_steps=num_steps,
        **{"max_num_seqs": 5, "threads": 2} | options,
    )


def requests_of(draw: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    prompts = prompts_of(*(draw.randint(1, 60) for _ in range(count)))
    kinds = [
        {"max_tokens": draw.randint(1, 45), "seed": draw.randrange(1000)} | draw.choice(KINDS)
        for _ in range(count)
    ]
    return [
        (prompt, SamplingParams(**{"ignore_eos": draw.random() < 0.5} | kind))
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]


class Traffic:
    """Sends requests, and aborts some, between any two steps."""

    def __init__(
        self,
        llm: LLM,
        requests: list[tuple[list[int], SamplingParams]],
        draw: random.Random,
        *,
        aborts: bool,
    ) -> None:
        self._frontend = llm.frontend
        self._draw = draw
        self._aborts = aborts
        self._coming = {str(index): request for index, request in enumerate(requests)}
        self._running: set[str] = set()
        self.aborted: set[str] = set()
        self.found: dict[str, list[Any]] = {}

    def run(self) -> dict[str, list[Any]]:
        while self._coming or self._running:
            if not self._running:
                self._arrive()
            self._happen()
            step = self._frontend.client.receive()
            assert step is not None
            self._take(step)
        return self.found

    def _happen(self) -> None:
        if self._coming and self._draw.random() < 0.06:
            self._arrive()
        if self._aborts and self._running and self._draw.random() < 0.01:
            request_id = self._draw.choice(sorted(self._running))
            self.aborted.add(request_id)
            self._frontend.client.abort(self._frontend.outputs.unfinished_ids(request_id))

    def _arrive(self) -> None:
        request_id = next(iter(self._coming))
        request = self._frontend.inputs.process(request_id, *self._coming.pop(request_id))
        self._frontend.outputs.add(request)
        self._frontend.client.add(request.samples)
        self._running.add(request_id)

    def _take(self, step: CoreOutputs) -> None:
        changes = self._frontend.outputs.process(step.outputs, time.monotonic())
        for request_id, is_finished in changes.changed.items():
            if is_finished:
                self._running.discard(request_id)
                self.found[request_id] = fingerprint(self._frontend.outputs.output(request_id))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("family", SCARCE)
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_in_a_call_are_single_steps(family, seed):
    """Requests with stops, lengths, samples, penalties and bans get the same in calls of many
    steps, with arrivals and aborts, with and without memory for all.
    """
    draw = random.Random(seed)
    requests = requests_of(draw, 24)
    with llm_of(family, 1) as llm:
        wanted = {
            str(index): fingerprint(llm.generate(prompt, params, use_tqdm=False)[0])
            for index, (prompt, params) in enumerate(requests)
        }
    scarce = (
        {"kv_cache_memory_bytes": SCARCE[family], "max_model_len": 112, "swap_space": "64KiB"}
        if seed % 2
        else {}
    )
    with llm_of(family, 8, **scarce) as llm:
        traffic = Traffic(llm, requests, draw, aborts=seed >= 2)
        found = traffic.run()
        stats = core_of(llm).scheduler.stats()
    assert stats.num_used_blocks == 0 and (stats.num_preemptions > 0 or seed != 1)
    assert set(found) == set(wanted) and (seed < 2 or traffic.aborted)
    for request_id, output in found.items():
        if request_id in traffic.aborted:
            for (_, tokens, _, _), (_, expected, _, _) in zip(
                output[:-1], wanted[request_id][:-1], strict=True
            ):
                assert tokens == expected[: len(tokens)]
        else:
            assert output == wanted[request_id]


FOLLOWING: dict[str, dict[str, Any]] = {
    "bad words": {"bad_words_token_ids": [[a, b] for a in range(4, 12) for b in range(4, 9)]},
    "DRY": {"dry_multiplier": 3.0, "dry_allowed_length": 1},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 1.0},
    "listed logprobs": {"logprob_token_ids": [5, 200, 6]},
    "listed logprobs and DRY": {
        "logprob_token_ids": [5, 200, 6],
        "dry_multiplier": 3.0,
        "dry_allowed_length": 1,
    },
}
"""Options by which a draw follows from the tokens before it, by rules that only Python knows, or
by which more is read than the draws.
"""


@pytest.mark.parametrize("kind", FOLLOWING)
def test_draws_that_follow_from_tokens_are_made_in_one_call(kind, tmp_path):
    """Rows with these options take many steps in a call, alone and beside others, and draw what
    they would one by one.
    """
    prompts, common = prompts_of(5, 9), {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0}
    common["allowed_token_ids"] = list(range(4, 12))
    plain = SamplingParams(**common, seed=3)
    wanted = [SamplingParams(**common, **FOLLOWING[kind], seed=3), plain]
    with llm_of("llama", 1) as llm:
        single = [fingerprint(output) for output in llm.generate(prompts, wanted)]
        (without,) = llm.generate(prompts[0], plain)
    path = tmp_path / "log"
    with llm_of("llama", 8, record=str(path)) as llm:
        together = [fingerprint(output) for output in llm.generate(prompts, wanted)]
        (alone,) = llm.generate(prompts[0], wanted[0])
    assert together == single and fingerprint(alone) == single[0] != fingerprint(without)
    _, events = read_log(path)
    steps = Counter(event.result.step for event in events if isinstance(event, StepComputed))
    assert sum(num == 8 for num in steps.values()) >= 6, "two calls of 40 tokens each"


LOOP = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}
LOOPING = {
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 60,
    "ignore_eos": True,
    "allowed_token_ids": [4, 5, 6, 7],
}


def test_a_loop_ends_its_call():
    """An answer that repeats itself ends with the token that it ends with in single steps, and
    nothing behind it leaves for a stream; the call ends with it, and the others go on.
    """
    prompts = prompts_of(5, 9)
    wanted = [
        SamplingParams(**LOOPING, repetition_detection=LOOP),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    ]
    with llm_of("llama", 1) as llm:
        single = [fingerprint(output) for output in llm.generate(prompts, wanted)]
        (endless,) = llm.generate(prompts[0], SamplingParams(**LOOPING))
    with llm_of("llama", 8) as llm:
        assert [fingerprint(output) for output in llm.generate(prompts, wanted)] == single
        frontend, sent = llm.frontend, dict[str, list[int]]()
        for name, prompt, params in zip("ab", prompts, wanted, strict=True):
            samples = frontend.inputs.process(name, prompt, params).samples
            frontend.client.add(samples)
            sent[samples[0].request_id] = []
        reasons: dict[str, str] = {}
        while len(reasons) < 2:
            step = frontend.client.receive()
            assert step is not None
            for output in step.outputs:
                sent[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
    loop = list(single[0][0][1])
    found = [(sent[name], reasons[name]) for name in sent]
    assert found == [(loop, "repetition"), (list(single[1][0][1]), "length")]
    assert len(loop) < 60 and loop == list(endless.outputs[0].token_ids[: len(loop)])


def test_what_leaves_between_steps_tells_the_bound_of_mirostat():
    """An engine that is told any token that was sent, and the bound sent with it, draws the rest of
    the answer.
    """
    params = SamplingParams(
        temperature=1.0, mirostat_mode=2, mirostat_tau=2.0, mirostat_eta=0.5, seed=4, max_tokens=20
    )
    ledger = RequestLedger()
    resumed: list[EngineRequest] = []
    with llm_of("llama", 8) as llm:
        frontend = llm.frontend
        samples = frontend.inputs.process("a", [3, 4, 5], params).samples
        ledger.add(samples)
        frontend.client.add(samples)
        (name,) = ledger.unfinished

        while len(ledger.unfinished[name].token_ids) < 20:
            step = frontend.client.receive()
            assert step is not None
            for output in step.outputs:
                ledger.unfinished[name].add_output(output)
                resumed.append(ledger.unfinished[name].resumed())
        whole = ledger.unfinished[name].token_ids
    assert len(resumed) == 20
    assert len({request.mirostat_mu for request in resumed}) == len(resumed)
    with llm_of("llama", 8) as llm:
        client = llm.frontend.client
        for request in resumed[1:-1:5]:
            token_ids = list(request.output_token_ids)
            client.add([request])
            while len(token_ids) < 20:
                step = client.receive()
                assert step is not None
                token_ids += [one for output in step.outputs for one in output.token_ids]
            assert token_ids == whole


def test_a_stream_gets_each_token_when_it_is_made():
    with llm_of("llama", 8) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        lengths = [len(output.outputs[0].token_ids) for output in llm.stream([3, 4, 5], params)]
        assert lengths == list(range(1, 21))
        (output,) = llm.generate([3, 4, 5], params, use_tqdm=False)
        assert output.metrics is not None and len(output.metrics.token_times) == 20


def test_a_call_ends_with_what_comes():
    """An abort or an arrival is seen between two steps of a call, and ends it."""
    with llm_of("llama", 8) as llm:
        frontend, params = (
            llm.frontend,
            SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
        )
        first, second = (frontend.inputs.process(name, [3, 4, 5], params) for name in "ab")
        frontend.client.add(first.samples)

        def receive() -> list[int]:
            step = frontend.client.receive()
            assert step is not None
            return [len(output.token_ids) for output in step.outputs]

        assert [receive() for _ in range(5)] == [[1]] * 5
        frontend.client.add(second.samples)
        assert receive() == [1, 1], "the second's prompt beside the first's next token"
        assert [receive() for _ in range(3)] == [[1, 1]] * 3
        frontend.client.abort([sample.request_id for sample in first.samples])
        step = frontend.client.receive()
        assert step is not None
        assert [output.finish_reason for output in step.outputs] == ["abort", None]


def test_steps_of_a_recording_are_made_again(tmp_path):
    from octavo.wiring.engine import build_executor

    draw, path = random.Random(7), tmp_path / "log"
    with llm_of(
        "llama", 8, record=str(path), kv_cache_memory_bytes="192KiB", max_model_len=128
    ) as llm:
        Traffic(llm, requests_of(draw, 12), draw, aborts=True).run()
    header, events = read_log(path)
    events = list(events)
    steps = Counter(event.result.step for event in events if isinstance(event, StepComputed))
    assert max(steps.values()) == 8
    assert max(event.plan.num_steps for event in events if isinstance(event, StepPlanned)) == 8
    executor = build_executor(header, model=None, report=lambda text: None)
    found = Replay(header, executor).run(events)
    executor.close()
    assert found.differences == [] and found.num_requests >= 12


class FailingChecks:
    """Has the check of every third call's second step or a later one fail, once its tokens are
    taken in.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failed = 0
        self._num_calls = 0
        self._num_checked = 0
        decode, check = ModelRunner.decode, SampleVerifier.__call__

        def counted_decode(runner, *args):
            self._num_calls += 1
            self._num_checked = 0
            try:
                yield from decode(runner, *args)
            finally:
                self._num_checked = -(1 << 30)

        def failing_check(draws, *args):
            found = check(draws, *args)
            self._num_checked += 1
            if self._num_checked == 2 + self._num_calls % 4 and self._num_calls % 3 == 0:
                self.num_failed += 1
                raise RuntimeError("a check that fails")
            return found

        monkeypatch.setattr(ModelRunner, "decode", counted_decode)
        monkeypatch.setattr(SampleVerifier, "__call__", failing_check)


def test_a_check_that_fails_between_steps_changes_no_answer(monkeypatch):
    """Rows have taken in the steps before it; the step that was not checked is computed again."""
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 40}
    kinds = [{"temperature": 0}, {}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.2}]
    wanted = [
        SamplingParams(
            max_tokens=70, seed=number, structured_outputs=StructuredOutputs(json=schema), **kind
        )
        for number, kind in enumerate(kinds)
    ]
    prompts = prompts_of(*range(4, 4 + len(wanted)))
    options = {"backend": "native", "skip_tokenizer_init": False, "num_scheduler_steps": 8}
    with make_llm(model_path=tiny_model_with_text(), **options) as llm:
        undisturbed = [fingerprint(output) for output in llm.generate(prompts, wanted)]
        failing = FailingChecks(monkeypatch)
        found = [fingerprint(output) for output in llm.generate(prompts, wanted)]
    assert failing.num_failed > 2
    assert found == undisturbed
