"""Random traffic over cores that hang at random: every request ends once, the sound ones with the
tokens they would have got.

The real scheduler and the real supervision; a core is an object here and not a process, so that
thousands of hangs take seconds.
"""

import random
from itertools import count

import pytest

from octavo.engine.clients.supervised import SupervisedClient
from tests.support.engine_fakes import FakeExecutor, expected_tokens, make_core, make_request

NEVER_S = 1e-4
"""How long a core may stand still: it either steps at once or it never will."""


class Hang(BaseException):
    """In place of a call that does not return."""


class Hanging(FakeExecutor):
    """Hangs for a request that is bad, from the token on at which it is; and now and then for
    nobody's fault.
    """

    def __init__(self, bad, chance):
        super().__init__()
        self.bad, self.chance = bad, chance

    def execute(self, plan, between=None):
        names = [row.request_id for row in plan.rows]
        if self.chance() or any(
            row.start + row.num_tokens >= self.bad.get(row.request_id, 1 << 30) for row in plan.rows
        ):
            raise Hang(names)
        return super().execute(plan, between)


class FakeProcess:
    """What `ProcessClient` is to the supervision. One step of its core for each `receive`."""

    trouble = ""

    def __init__(self, executor, **options):
        self.core = make_core(executor=executor, **options)
        self.is_ready = False
        self.slate = self
        self.beats = 0
        self.computed = []
        self.said = []

    def add(self, requests):
        for request in requests:
            self.core.add(request)

    def abort(self, names):
        for name in names:
            self.core.abort(name)

    def read(self):
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

    def kill(self):
        return []

    def close(self):
        pass


@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_as_it_should(seed):
    draw = random.Random(seed)
    bad, prompts, aborted, ends, tokens, starts = {}, {}, set(), {}, {}, []
    lucky = draw.choice([0.0, 0.0, 0.005])
    options = {
        "num_blocks": draw.choice([12, 64]),
        "budget": draw.choice([16, 64]),
        "max_num_seqs": draw.choice([2, 8]),
    }

    def start(num_before):
        starts.append(num_before)
        return FakeProcess(Hanging(bad, lambda: draw.random() < lucky), **options)

    client = SupervisedClient(start, stall_timeout_s=NEVER_S, report=lambda text: None)
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
        take(client, tokens, ends)
    for _ in range(3000):
        if len(ends) == len(prompts):
            break
        take(client, tokens, ends)
    assert ends.keys() == prompts.keys()
    for name, prompt in prompts.items():
        expected = expected_tokens(prompt, 12)
        got = tokens.get(name, [])
        assert got == expected[: len(got)], "what came before and after a hang fits together"
        if ends[name] == "length":
            assert name not in bad and len(got) == 12
        elif ends[name] == "abort":
            assert name in aborted
        elif not lucky:
            assert ends[name] == "error" and name in bad, "nobody fails who hangs nothing"
    assert not client._requests and starts == list(range(len(starts)))
    stats = client._stats
    assert stats.num_restarts == len(starts) - 1 and stats.num_added == len(prompts)
    if bad.keys() - aborted:
        assert len(starts) > 1


def take(client, tokens, ends):
    step = client.receive(timeout_s=0.001)
    for output in step.outputs if step is not None else ():
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            assert output.request_id not in ends, "one end each"
            ends[output.request_id] = output.finish_reason
