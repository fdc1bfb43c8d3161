"""Steps that are launched before the previous one has returned: last tokens that only the device
knows, and steps that fail after their launch.
"""

import numpy as np
import pytest

from octavo.executor.batch import StepOutput
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all, tokens_of
from tests.support.worker_fakes import FakeRunnable, make_worker

UNKNOWN = -5


class LaunchingRunnable(FakeRunnable):
    """A runnable that computes at once and returns results later, as a device does.

    Each row's last token stays in it, where no other part can read it.
    """

    def __init__(self, **fields):
        super().__init__(**fields)
        self.last = np.full(64, UNKNOWN, np.int32)
        self.fail_next = 0
        """Number of next results that raise, so that the tokens they drew are lost."""

    def launch(self, batch, kv):
        sources = batch.last_tokens.sources
        batch.token_ids = np.where(sources >= 0, self.last[sources], batch.token_ids)
        output = self.run(batch, kv)
        targets = batch.last_tokens.targets
        if self.fail_next:
            self.fail_next -= 1
            return LaunchedResult(RuntimeError("the device is ill"))
        self.last[targets[targets >= 0]] = output.samples.token_ids[targets >= 0]
        return LaunchedResult(output)


class LaunchedResult:
    """A step's result, or the error that its `result` raises."""

    def __init__(self, what):
        self.what = what

    def result(self) -> StepOutput:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


@pytest.fixture
def runnable():
    return LaunchingRunnable()


@pytest.fixture
def core(runnable):
    return make_core(executor=make_worker(runnable, max_rows=16), runs_ahead=True, caching=False)


def add(core, name, prompt, **fields):
    core.add(make_request(name, prompt, **fields))
    return expected_tokens(prompt, 8)


def test_last_tokens_stay_on_the_device(core, runnable):
    wanted = {
        "a": add(core, "a", [1, 2, 3]),
        "b": add(core, "b", list(range(40)), logprobs=2, prompt_logprobs=1),
    }
    outputs = run_all(core)
    assert {name: tokens_of(found) for name, found in outputs.items()} == wanted
    sources = [batch.last_tokens.sources.tolist() for batch in runnable.batches]
    assert sources == [[-1] * 43, *[[0, 1]] * 7]
    assert runnable.batches[0].last_tokens.targets.tolist() == [0, 1] + [-1] * 39, (
        "a prompt's own tokens are not last tokens"
    )
    assert len(outputs["b"][0].prompt_logprobs) == 39


def test_a_step_that_fails_after_its_launch_is_computed_again_with_what_was_launched_on_it(
    core, runnable, caplog
):
    wanted = {"a": add(core, "a", [1, 2, 3]), "b": add(core, "b", [4, 5])}
    for _ in range(2):
        core.step()
    runnable.fail_next = 1
    outputs = run_all(core)
    assert {name: [*tokens_of(found)][-7:] for name, found in outputs.items()} == {
        name: tokens[1:] for name, tokens in wanted.items()
    }
    assert caplog.text.count("a step of 2 requests failed after its launch") == 1
    assert len(runnable.batches) == 8 + 2, "that one, and the next"


def test_steps_in_flight_are_taken_in_before_rows_are_run_one_by_one(core, runnable):
    """A step fails after its launch, and the one that builds on it cannot be launched."""
    wanted = {"a": add(core, "a", [1, 2, 3]), "b": add(core, "b", [4, 5])}
    found = {"a": [], "b": []}
    for step in range(3):
        runnable.fail_next = int(step == 2)
        for output in core.step().outputs:
            found[output.request_id] += output.token_ids
    add(core, "bad", [77, 5])
    runnable.raise_on = 77
    for name, outputs in run_all(core).items():
        found.setdefault(name, []).extend(tokens_of(outputs))
    assert found == wanted | {"bad": []}


def test_a_row_that_keeps_a_step_from_being_launched_fails_alone(core, runnable, caplog):
    wanted = add(core, "a", [1, 2, 3])
    found = [token for _ in range(3) for token in tokens_of(core.step().outputs)]
    runnable.raise_on = 77
    add(core, "bad", [77, 5])
    outputs = run_all(core)
    assert found + tokens_of(outputs["a"]) == wanted
    assert outputs["bad"][-1].error == "the step failed: RuntimeError: kernel fault"
    assert "could not be launched" in caplog.text


def test_a_row_with_nan_logits_ends_and_its_next_step_is_discarded(core, runnable):
    wanted = add(core, "a", [1, 2, 3])
    runnable.nan_on = add(core, "b", [4, 5])[3]
    outputs = run_all(core)
    assert tokens_of(outputs["a"]) == wanted
    assert outputs["b"][-1].finish_reason == "error" and len(tokens_of(outputs["b"])) == 4


def test_all_running_requests_may_end_while_as_many_start():
    """A request that has ended keeps its row until the step in flight has returned, so the worker
    has rows for twice as many.
    """
    core = make_core(
        executor=make_worker(LaunchingRunnable(), max_rows=8), runs_ahead=True, max_num_seqs=4
    )
    prompts = {str(index): [index, 2 * index + 1] for index in range(40)}
    for name, prompt in prompts.items():
        core.add(
            make_request(name, prompt, max_tokens=6, eos=tuple(expected_tokens(prompt, 2)[1:]))
        )
    outputs = run_all(core)
    assert {name: tokens_of(found) for name, found in outputs.items()} == {
        name: expected_tokens(p, 2) for name, p in prompts.items()
    }
