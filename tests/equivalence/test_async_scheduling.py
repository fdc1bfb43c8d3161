"""With asynchronous scheduling and without, requests get the same tokens, logprobs and ends,
bitwise.

Torch runs on the CPU, batch-invariant, through the path that CUDA takes (last tokens kept on the
device, results fetched later); the reference backend runs in a thread that computes a step while
the next one is planned.
"""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.ports import Executor
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.engine.recording.recorder import StepPlanned, read_log
from octavo.engine.recording.replay import Replay
from octavo.wiring.engine import build_executor
from tests.equivalence.test_llm_equivalence import Setup
from tests.support.llm_tools import GREEDY, core_of, fingerprint, make_llm, prompts_of

pytestmark = pytest.mark.sampled(one_in=2)

STOPS = list(range(3, 320, 40))
VARIED = {"temperature": 1.3, "max_tokens": 50, "seed": 5, "stop_token_ids": STOPS, "logprobs": 2}
PARAMS = [
    SamplingParams(**VARIED),
    SamplingParams(**VARIED | {"n": 2, "top_k": 30}),
    SamplingParams(**VARIED | {"min_tokens": 4, "prompt_logprobs": 1, "top_p": 0.9}),
    SamplingParams(
        **VARIED
        | {"ignore_eos": True, "stop_token_ids": None, "max_tokens": 11, "logit_bias": {7: 3.0}}
    ),
    SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=list(range(5, 200))),
    SamplingParams(**VARIED | {"frequency_penalty": 0.7, "repetition_penalty": 1.2}),
    SamplingParams(**VARIED | {"bad_words_token_ids": [[7, 8], [9]]}),
]

PENALTIES: list[dict[str, Any]] = [
    {"temperature": 0.8, "repetition_penalty": 1.4},
    {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.3, "logprobs": 1},
]
REPETITIONS: list[dict[str, Any]] = [
    {"temperature": 0, "dry_multiplier": 1.5},
    {
        "temperature": 0.8,
        "dry_multiplier": 2.0,
        "dry_penalty_last_n": 9,
        "dry_sequence_breaker_ids": [5],
        "repetition_penalty": 0.8,
        "logprobs": 1,
    },
    {
        "temperature": 0,
        "bad_words_token_ids": [[a, b] for a in range(4, 10) for b in (a, a + 1)] + [[10]],
        "logit_bias": {5: 2.0},
    },
    {
        "temperature": 0.5,
        "dry_multiplier": 0.8,
        "bad_words_token_ids": [[a, b, c] for a in range(4, 9) for b in (4, 5) for c in (4, 6)],
        "min_tokens": 20,
    },
]
REPEATED = msgspec.structs.replace(GREEDY, dry_multiplier=2.0, dry_allowed_length=1)


class InAThread:
    """Runs any executor in a thread, as a `ports.AsyncExecutor`; rows find last tokens on the host,
    since the step before has been computed.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1)
        self.plans: list[StepPlan] = []

    progress = 0

    def execute(self, plan: StepPlan) -> StepResult:
        return self._executor.execute(plan)

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan)
        return self._thread.submit(self._executor.execute, plan)

    def close(self) -> None:
        self._thread.shutdown()
        self._executor.close()


def engine(
    backend: str, *, ahead: bool, family: str = "llama", num_blocks: int = 200, **options: Any
) -> LLM:
    options["async_scheduling"] = "on" if ahead and backend == "torch" else "off"
    llm = Setup(backend, family, "as packed").llm_of_blocks(num_blocks, **options)
    if ahead and backend != "torch":
        core = core_of(llm)
        core.executor, core.steps_ahead = InAThread(core.executor), 1
    return llm


def mixed(
    llm: LLM, seed: int, params: list[SamplingParams], num_requests: int = 12
) -> dict[int, Any]:
    """Returns the outputs of requests that come one after the other; some of them leave early."""
    draw = random.Random(seed)
    shared = prompts_of(40)[0]
    streams, final = {}, {}

    def turn() -> None:
        for index, stream in list(streams.items()):
            output = next(stream, None)
            patience[index] -= 1
            if output is not None:
                final[index] = output
            if output is None or not patience[index]:
                streams.pop(index).close()

    tails = [
        [draw.randrange(3, 240) for _ in range(draw.randint(1, 12))] for _ in range(num_requests)
    ]
    prompts = [shared[: draw.choice([0, 16, 37, 40])] + tail for tail in tails]
    patience = [draw.choice([5, 1000, 1000, 1000]) for _ in prompts]
    for index, prompt in enumerate(prompts):
        streams[index] = llm.stream(prompt, params[index % len(params)])
        for _ in range(draw.randrange(2)):
            turn()
    while streams:
        turn()
    return {index: fingerprint(output) for index, output in final.items() if output.finished}


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        ("reference", "llama"),
        ("reference", "gemma3_text"),
        ("torch", "llama"),
        pytest.param("torch", "gemma3_text", marks=pytest.mark.slow),
    ],
)
def test_a_mix_of_requests_gets_the_same(backend: str, family: str) -> None:
    options = {
        "family": family,
        "max_model_len": 128,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 5,
    }
    with engine(backend, ahead=False, **options) as llm:
        roomy = mixed(llm, 1, PARAMS)
    assert {sample[2] for found in roomy.values() for sample in found[:-1]} == {"stop", "length"}
    for ahead in (False, True):
        with engine(backend, ahead=ahead, num_blocks=8, **options) as llm:
            found, stats = mixed(llm, 1, PARAMS), core_of(llm).scheduler.stats()
            assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0
        both = found.keys() & roomy.keys()
        assert len(both) > 6 and {index: found[index] for index in both} == {
            index: roomy[index] for index in both
        }


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_steps_do_run_ahead(backend: str) -> None:
    """Rows run ahead after the first of their request; one with DRY never does, and takes part in
    every second step beside others that do.
    """
    taken = []
    with engine(backend, ahead=True) as llm:
        executor = core_of(llm).executor
        launch = executor.launch  # type: ignore[attr-defined]
        executor.launch = lambda plan: (
            taken.append([row.from_device for row in plan.rows]),
            launch(plan),
        )[1]  # type: ignore[attr-defined]
        llm.generate(prompts_of(5, 9), GREEDY, use_tqdm=False)
        assert taken == [[False, False], *[[True, True]] * 7]
        taken.clear()
        llm.generate(prompts_of(5, 9), [GREEDY, REPEATED], use_tqdm=False)
        num_tokens = GREEDY.max_tokens
        assert sum(flag for row in taken for flag in row) == num_tokens - 1
        assert [len(row) for row in taken[:4]] == [2, 1, 2, 1] and len(taken) >= num_tokens


@pytest.mark.parametrize("params", PENALTIES + REPETITIONS, ids=str)
def test_the_device_looks_at_the_last_token_itself(params: dict[str, Any]) -> None:
    """Rows with penalties, bad words and DRY run ahead, and draw what they draw after their tokens
    are known: few tokens may come, so that they are counted again and again, and new ones at first.
    """
    wanted = [
        SamplingParams(
            max_tokens=30, ignore_eos=True, seed=3, allowed_token_ids=list(range(4, 16)), **params
        ),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=4, temperature=1.0),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=5, **params),
    ]
    prompts = prompts_of(5, 9, 20)
    with engine("torch", ahead=False) as llm:
        in_turn = [fingerprint(output) for output in llm.generate(prompts, wanted)]
    with engine("torch", ahead=True) as llm:
        ahead = [fingerprint(output) for output in llm.generate(prompts, wanted)]
        steps = core_of(llm).scheduler.stats().num_steps
    assert ahead == in_turn and steps < 34, "a token of each row in every step"


def test_a_recording_that_ran_ahead_is_made_again(tmp_path) -> None:
    """A recording that ran ahead is made again by an executor that does one step after the
    other.
    """
    path = tmp_path / "log"
    options = {
        "backend": "torch",
        "kv_cache_memory_bytes": "256KiB",
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
    }
    with make_llm(record=str(path), async_scheduling="on", **options) as llm:
        llm.generate(prompts_of(40, 50, 41), PARAMS[:3], use_tqdm=False)
    header, events = read_log(path)
    events = list(events)
    assert any(
        row.from_device
        for event in events
        if isinstance(event, StepPlanned)
        for row in event.plan.rows
    )
    executor = build_executor(header, model=None, report=lambda text: None)
    assert Replay(header, executor).run(events).differences == []
    executor.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "native"},
            "async_scheduling: got 'on', but the native backend computes in the scheduler's"
            " process",
        ),
        ({"backend": "reference"}, "the reference backend computes in"),
        (
            {"backend": "torch", "tensor_parallel_size": 2},
            r"got 'on', but ranks \(tensor_parallel_size\) execute one step at a time",
        ),
        ({"backend": "torch", "kv_cache": False}, "without kv_cache each step"),
        (
            {"backend": "torch", "scheduler_delay_factor": 1.0, "enable_chunked_prefill": False},
            "scheduler_delay_factor requires the result",
        ),
    ],
)
def test_where_it_cannot_be_it_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        derive(
            EngineConfig.from_options(async_scheduling="on", **options),
            model_context_tokens=100,
            num_threads=1,
        )
    assert caught.value.hint == "set async_scheduling to auto"
    derive(EngineConfig.from_options(**options), model_context_tokens=100, num_threads=1)


def test_auto_is_off_on_the_cpu() -> None:
    with make_llm(backend="torch") as llm:
        assert core_of(llm).steps_ahead == 0
