"""Rows are computed by the Program that the plan names, and a pooled row's fault is its own."""

from __future__ import annotations

import numpy as np

from octavo.api.pooling_params import PoolingParams
from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.step import NewRequest, ResultKind, ScheduledRequest, StepPlan
from octavo.executor.batch import StepBatch, StepOutput
from octavo.executor.kv import BLOCK_SIZE, KvCache
from octavo.worker.cache_engine import CacheEngine, HostShape
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_runner import ModelRunner
from octavo.worker.pooling_runner import PoolingRunner, finished
from octavo.worker.program_runners import ProgramRunners
from octavo.worker.worker import Worker
from tests.support.engine_fakes import VOCAB
from tests.support.worker_fakes import FakeKv, FakeRunnable

BAD = 66
"""A token of which the model makes NaN."""


class FakeEncoder(FakeRunnable):
    """Pools the sum of the tokens, and how many of them are in the second segment."""

    def run(self, batch: StepBatch, kv: KvCache, verify: object = None) -> StepOutput:
        self.batches.append(batch)
        rows = []
        for first, end in zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True):
            ids = batch.token_ids[first:end]
            total = np.nan if BAD in ids else float(ids.sum())
            rows.append([total, float(batch.positions[1, first:end].sum())])
        return StepOutput(arrays={"pooled": np.array(rows, np.float32)})


def make_worker() -> Worker:
    rows = InputBatch(max_rows=8, max_model_len=64, num_groups=1, vocab_size=VOCAB)
    kv = FakeKv(1, 32)
    pooling = PoolingRunner(FakeEncoder(), kv, rows, num_position_axes=2)
    runners = ProgramRunners({"decoder": ModelRunner(FakeRunnable(), kv, rows), "encoder": pooling})
    cache_engine = CacheEngine(kv, [HostShape(32, 8 * BLOCK_SIZE)])
    return Worker(runners, cache_engine, rows, close=lambda: None)


def pooled_row(name: str, ids: list[int], second_start: int | None = None) -> NewRequest:
    params = PoolingParams(normalize=False)
    return NewRequest(name, ids, len(ids), params, seed=0, second_start=second_start)


def plan_of(new_rows: list[NewRequest]) -> StepPlan:
    rows = [
        ScheduledRequest(
            new.request_id,
            0,
            len(new.token_ids),
            [[index]],
            program="encoder" if isinstance(new.params, PoolingParams) else "decoder",
            result_kind=ResultKind.POOL
            if isinstance(new.params, PoolingParams)
            else ResultKind.SAMPLE,
        )
        for index, new in enumerate(new_rows)
    ]
    return StepPlan(0, [], new_rows, [], rows)


def test_a_step_of_two_programs_gives_each_row_its_own() -> None:
    drawn = NewRequest("draws", [5, 6], 2, SamplingParams(temperature=0), seed=0)
    plan = plan_of([pooled_row("a", [1, 2]), drawn, pooled_row("b", [3, 4, 5], second_start=1)])
    first, second, third = make_worker().execute(plan).rows
    assert first.pooled is not None and third.pooled is not None
    assert np.frombuffer(first.pooled, "<f4").tolist() == [3, 0]
    assert second.pooled is None and len(second.token_ids) == 1
    assert np.frombuffer(third.pooled, "<f4").tolist() == [12, 2]


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    plan = plan_of([pooled_row("good", [1, 2]), pooled_row("bad", [BAD])])
    good, bad = make_worker().execute(plan).rows
    assert good.failure is None and good.pooled is not None
    assert bad.failure is not None and "NaN" in bad.failure
    assert bad.pooled is None and bad.num_kept == 0


def test_a_pooled_row_is_finished_as_its_params_say() -> None:
    row = np.array([3, 4, 12], np.float32)
    cut = finished(row, PoolingParams(dimensions=2, normalize=True))
    np.testing.assert_allclose(cut, [0.6, 0.8])
    assert finished(0 * row, PoolingParams(normalize=True)).tolist() == [0, 0, 0]
    chances = finished(row * 100, PoolingParams(activation="softmax"))
    np.testing.assert_allclose(chances, [0, 0, 1], atol=1e-12)
    np.testing.assert_allclose(
        finished(np.array([-1e4, 0, 1e4]), PoolingParams(activation="sigmoid")), [0, 0.5, 1]
    )
