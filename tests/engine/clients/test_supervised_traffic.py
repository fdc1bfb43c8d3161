"""Every request ends once under random traffic over cores that hang and die at random, the sound
ones with the tokens they would have got.

The scheduler and the supervision are real; a core is an object and not a process, so that thousands
of failures take seconds.
"""

import random
from itertools import count

import msgspec
import pytest

from octavo.api.errors import EngineDead
from octavo.engine.clients import watchdog
from octavo.engine.clients.client import AddRequests
from octavo.engine.clients.supervised import SupervisedClient
from octavo.engine.protocol.stats import EngineStats
from tests.support.engine_fakes import FakeExecutor, expected_tokens, make_core, make_request

STALL_S = 1e-4
"""Stall timeout in seconds: a core here either steps at once or it never will."""


class Hang(BaseException):
    """Stands for a call that does not return."""


class Death(BaseException):
    """Stands for a call that ends the process."""


class FailingExecutor(FakeExecutor):
    """An executor that fails for a bad request from a certain token on, and now and then for no
    fault of a request.
    """

    def __init__(self, bad, chance, failure):
        super().__init__()
        self.bad, self.chance, self.failure = bad, chance, failure

    def execute(self, plan):
        names = [row.request_id for row in plan.rows]
        if self.chance() or any(
            row.start + row.num_tokens >= self.bad.get(row.request_id, 1 << 30) for row in plan.rows
        ):
            raise self.failure()(names)
        return super().execute(plan)


class FakeProcess:
    """The part of ProcessClient that the supervision uses, over a core in this process.

    It is its own heartbeat page. Each `receive` is one step.
    """

    def __init__(self, executor, **options):
        self.core = make_core(executor=executor, **options)
        self.is_ready = False
        self.heartbeat = self
        self.beats = 0
        self.computed = []

    def add(self, requests):
        for request in requests:
            self.core.add(request)

    def add_encoded(self, data):
        self.add(msgspec.msgpack.decode(data, type=AddRequests).requests)

    def abort(self, names):
        for name in names:
            self.core.abort(name)

    def step_requests(self):
        return self.computed

    def receive(self, timeout_s):
        self.is_ready = True
        if self.computed or not self.core.has_work:
            return None
        self.beats += 1
        try:
            return self.core.step()
        except Hang as hang:
            self.computed = hang.args[0]
            return None
        except Death as death:
            self.computed = death.args[0]
            raise EngineDead("the engine process has exited (killed by signal 9)") from None

    def kill(self):
        return []

    def close(self):
        pass


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_as_it_should(seed, monkeypatch):
    monkeypatch.setattr(watchdog, "MAX_DELAY_S", 0.002)
    monkeypatch.setattr(watchdog, "FIRST_DELAY_S", 0.001)
    draw = random.Random(seed)
    failures = [[Hang], [Death], [Hang, Death]][seed % 3]
    bad, prompts, aborted, ends, tokens, starts = {}, {}, set(), {}, {}, []
    lucky = draw.choice([0.0, 0.0, 0.005])
    options = {
        "num_blocks": draw.choice([12, 64]),
        "budget": draw.choice([16, 64]),
        "max_num_seqs": draw.choice([2, 8]),
    }

    def start(num_before, _):
        starts.append(num_before)
        executor = FailingExecutor(
            bad, lambda: draw.random() < lucky, lambda: draw.choice(failures)
        )
        return FakeProcess(executor, **options)

    client = SupervisedClient(start, stall_timeout_s=STALL_S, report=lambda text: None)
    stats = EngineStats()
    names = map(str, count())
    for _ in range(400):
        if draw.random() < 0.2 and len(prompts) < 40:
            name = next(names)
            prompts[name] = [draw.randrange(900)] * draw.randrange(1, 60)
            if draw.random() < 0.2:
                bad[name] = draw.randrange(1, len(prompts[name]) + 12)
            client.add([make_request(name, prompts[name], max_tokens=12)])
        if prompts and draw.random() < 0.05:
            name = draw.choice(list(prompts))
            aborted.add(name)
            client.abort([name])
        stats = take(client, tokens, ends) or stats
    for _ in range(3000):
        if len(ends) == len(prompts):
            break
        stats = take(client, tokens, ends) or stats
    assert ends.keys() == prompts.keys()
    for name, prompt in prompts.items():
        expected = expected_tokens(prompt, 12)
        got = tokens.get(name, [])
        assert got == expected[: len(got)], "what came before and after a failure fits together"
        if ends[name] == "length":
            assert name not in bad and len(got) == 12
        elif ends[name] == "abort":
            assert name in aborted
        elif not lucky:
            assert ends[name] == "error" and name in bad, "only a bad request fails"
    while client.trouble:
        stats = take(client, tokens, ends) or stats
    assert client.receive(timeout_s=0.001) is None and starts == list(range(len(starts)))
    assert stats.num_restarts == len(starts) - 1 and stats.num_added == len(prompts)
    if bad.keys() - aborted:
        assert len(starts) > 1


def take(client, tokens, ends):
    """Receives once, notes tokens and ends, and returns the statistics that came with them."""
    step = client.receive(timeout_s=0.001)
    for output in step.outputs if step is not None else ():
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            assert output.request_id not in ends, "one end each"
            ends[output.request_id] = output.finish_reason
    return step and step.stats
