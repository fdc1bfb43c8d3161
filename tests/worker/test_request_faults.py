"""A fault in the preparation of one row fails that row's request and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from octavo import SamplingParams
from octavo.api.outputs import RequestOutput
from octavo.engine.protocol.ports import Executor
from octavo.engine.protocol.step import (
    NewRequest,
    ResultKind,
    RowResult,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampling.sampling_states import SamplingStates
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all, tokens_of
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.worker_fakes import FakeRunnable, make_worker

GOOD = [1, 2, 3]
BAD_SEED = 666


class Poison:
    """A value that raises whatever is done with it."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("poison")

    __int__ = __float__ = __index__ = __array__ = __iter__ = __len__ = __bool__ = _raise
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __hash__ = _raise  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __and__ = __getitem__ = __contains__ = _raise


def poisoned(struct: Any, field: str, value: object) -> Any:
    """Returns a copy of a struct with one value that its constructor would not take."""
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    copy = type(struct)(**values)
    msgspec.structs.force_setattr(copy, field, value)
    return copy


class PoisoningExecutor:
    """Poisons one field of what the plans say of the request "bad"."""

    def __init__(self, executor: Executor, kind: type, field: str, value: object) -> None:
        self._executor = executor
        self._kind = kind
        self._field = field
        self._value = value
        self.progress = 0

    def execute(self, plan: StepPlan) -> StepResult:
        rows = [
            poisoned(row, self._field, self._value)
            if self._kind is ScheduledRequest and row.request_id == "bad"
            else row
            for row in plan.rows
        ]
        new_rows = [self._new_row(new) for new in plan.new_rows]
        return self._executor.execute(msgspec.structs.replace(plan, new_rows=new_rows, rows=rows))

    def _new_row(self, new: NewRequest) -> NewRequest:
        if new.request_id != "bad" or self._kind is ScheduledRequest:
            return new
        if self._kind is NewRequest:
            return poisoned(new, self._field, self._value)
        return poisoned(new, "params", poisoned(new.params, self._field, self._value))

    def close(self) -> None:
        self._executor.close()


def fields_of(kind: type[msgspec.Struct], *without: str) -> list[Any]:
    return [
        pytest.param(kind, name, id=f"{kind.__name__}.{name}")
        for name in kind.__struct_fields__
        if name not in without
    ]


def run_beside(kind: type, field: str, value: object, **options: Any) -> tuple[Any, Any]:
    """Runs a request whose field is poisoned between two good ones; returns its outputs and the
    core.
    """
    worker = make_worker(FakeRunnable(), **options)
    core = make_core(executor=PoisoningExecutor(worker, kind, field, value))
    core.add(make_request("before", GOOD))
    core.step()
    core.add(make_request("bad", [4, 5, 6], prompt_logprobs=0, repetition_penalty=1.5))
    core.add(make_request("after", [7, 8], frequency_penalty=0.5))
    found = run_all(core)
    assert tokens_of(found["before"])[-7:] == expected_tokens(GOOD, 8)[-7:]
    assert tokens_of(found["after"]) == expected_tokens([7, 8], 8)
    assert core.scheduler.blocks.num_free_blocks == 64
    core.add(make_request("bad", GOOD))
    return found["bad"], core


READ = {
    NewRequest: {
        "token_ids",
        "num_prompt_tokens",
        "first_position",
        "params",
        "seed",
        "sample_index",
        "end_token_ids",
        "grammar",
        "mirostat_mu",
        "adapter_slot",
        "encoder_input",
        "media",
    },
    SamplingParams: {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "top_n_sigma",
        "dynatemp_range",
        "dynatemp_exponent",
        "xtc_probability",
        "xtc_threshold",
        "mirostat_mode",
        "mirostat_tau",
        "dry_multiplier",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
        "bad_words_token_ids",
        "logits_processors",
    },
    ScheduledRequest: {
        "search_of",
        "result_kind",
        "start",
        "num_tokens",
        "num_prompt_logprobs",
        "draft_ids",
        "leaf_blocks",
    },
}
"""Fields that a row's preparation reads."""


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "ranks"])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *fields_of(NewRequest, "request_id"),
        *fields_of(SamplingParams),
        *fields_of(ScheduledRequest, "request_id", "new_block_ids", "replaced_blocks"),
    ],
)
def test_a_fault_at_any_field_of_a_row_fails_that_row_alone(kind, field, is_alone):
    bad, _ = run_beside(kind, field, Poison(), is_alone=is_alone)
    if field in READ[kind]:
        assert "the step failed" in bad[-1].error
    else:
        assert bad[-1].error is None and tokens_of(bad) == expected_tokens([4, 5, 6], 8)


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize(
    ("field", "value"), [("new_block_ids", [[Poison()]]), ("replaced_blocks", [Poison()])]
)
def test_a_fault_in_a_rows_block_table_fails_that_row_alone(field, value, virtual):
    bad, _ = run_beside(ScheduledRequest, field, value, virtual=virtual)
    assert bad[-1].finish_reason == "error"


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "ranks"])
def test_a_number_that_no_array_holds_fails_its_own_request(is_alone):
    bad, _ = run_beside(SamplingParams, "top_k", 1 << 31, is_alone=is_alone)
    assert "the step failed: OverflowError" in bad[-1].error


def test_an_id_whose_row_failed_can_be_used_again():
    _, core = run_beside(SamplingParams, "top_k", 1 << 31)
    core.executor = make_worker(FakeRunnable())
    assert tokens_of(run_all(core)["bad"]) == expected_tokens(GOOD, 8)


def test_memory_that_one_of_several_ranks_lacks_ends_the_step(monkeypatch):
    """The other ranks may have it, and would compute the row."""

    def add(rows: InputBatch, new: NewRequest) -> None:
        raise MemoryError

    monkeypatch.setattr(InputBatch, "add", add)
    plan = StepPlan(0, [], [NewRequest("a", GOOD, 3, SamplingParams(), 0)], [], [])
    with pytest.raises(MemoryError):
        make_worker(FakeRunnable(), is_alone=False).execute(plan)
    alone = make_worker(FakeRunnable())
    plan.rows = [ScheduledRequest("a", 0, 3, [[0]], result_kind=ResultKind.SAMPLE)]
    assert alone.execute(plan).rows == [RowResult("a", failure="the step ran out of memory")]


def raise_when_added(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SamplingStates.add

    def add(rows: SamplingStates, row: int, new: NewRequest) -> None:
        if new.seed == BAD_SEED:
            raise RuntimeError("poison")
        own(rows, row, new)

    monkeypatch.setattr(SamplingStates, "add", add)


def raise_when_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises while a step's arrays are gathered, from the bad request's second token on."""
    own, bad = ModelRunner.prepare_inputs, set()
    add = InputBatch.add

    def note(rows: InputBatch, new: NewRequest) -> None:
        add(rows, new)
        if new.seed == BAD_SEED:
            bad.add(new.request_id)

    def prepare_inputs(
        runner: ModelRunner, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> Any:
        if any(row.request_id in bad and row.start >= 20 for row in scheduled):
            raise RuntimeError("poison")
        return own(runner, scheduled, num_steps)

    monkeypatch.setattr(InputBatch, "add", note)
    monkeypatch.setattr(ModelRunner, "prepare_inputs", prepare_inputs)


@pytest.mark.parametrize("inject", [raise_when_added, raise_when_prepared])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "native", "num_scheduler_steps": 1},
        {"backend": "native", "num_scheduler_steps": 8},
        {"backend": "torch", "async_scheduling": "on"},
    ],
    ids=["native", "native-8", "torch-async"],
)
def test_the_requests_beside_a_fault_are_bitwise_as_without_it(monkeypatch, options, inject):
    prompts = prompts_of(5, 20, 33, 17)
    kinds = [SAMPLED, SamplingParams(seed=BAD_SEED, max_tokens=8), PENALISED, GREEDY]
    with make_llm(**options) as llm:
        alone = [llm.generate(prompt, kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)]
        inject(monkeypatch)
        together: list[RequestOutput] = llm.generate(prompts, kinds)
    assert together[1].error is not None and "RuntimeError: poison" in together[1].error
    for index in (0, 2, 3):
        assert fingerprint(together[index]) == fingerprint(alone[index])
