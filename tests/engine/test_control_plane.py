"""BlockManager and Scheduler together under a hypothesis state machine, with a pseudo-model whose
tokens depend on every KV entry.

Requests of a small alphabet (so that prefixes meet) come, fork, search with beams, are stepped,
preempted, swapped, aborted and failed by the device, in a cache that is far too small for them,
under every policy; a group with a window stands beside one without. Blocks go to slots of host
memory and on to a disk, which is slow, small, loses and damages blocks, refuses them, and is shared
with another engine; prompts are pinned there; the engine crashes and comes back.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from octavo.api.errors import InvalidRequest
from octavo.engine.protocol.prompt_limits import AllocStatus
from octavo.engine.protocol.requests import Pin, PrefixRef, ResetPrefixCache
from tests.engine.control_plane_invariants import (
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    ControlPlaneInvariants,
)
from tests.support.engine_fakes import (
    FakeExecutor,
    LaunchingExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
)
from tests.support.fake_tiers import Disk, FakeTiers
from tests.support.tiers import examples

WINDOW = 21

PROMPTS = st.builds(
    lambda blocks, tail: [token for token in blocks for _ in range(16)] + tail,
    st.lists(st.integers(0, 1), max_size=5),
    st.lists(st.integers(0, 1), min_size=1, max_size=10),
)
"""Few different blocks, so that prefixes meet."""

WHICH = st.integers(0, 100)


class ControlPlaneMachine(ControlPlaneInvariants):
    """The engine under test. `given` holds every request's prompt, length and sample, `tokens` what
    came back.
    """

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
        caching=st.booleans(),
        windows=st.sampled_from([[None], [None, WINDOW], [WINDOW]]),
        budget=st.sampled_from([3, 20, 64]),
        num_host_blocks=st.sampled_from([0, 4, 100]),
        num_slots=st.sampled_from([50, 6, 2, 0]),
        disk_blocks=st.sampled_from([1000, 30, 12, None]),
        runs_ahead=st.booleans(),
        num_scheduler_steps=st.sampled_from([1, 3, 8]),
    )
    def begin(
        self,
        policy,
        mode,
        caching,
        windows,
        budget,
        num_host_blocks,
        num_slots,
        disk_blocks,
        runs_ahead,
        num_scheduler_steps,
    ):
        """Builds the engine: without `disk_blocks` nothing is stored behind the slots; with
        `runs_ahead` a step is planned while another is in flight.
        """
        self.windows, self.disk = windows, Disk(disk_blocks) if disk_blocks else None
        self.options = {
            "num_blocks": NUM_BLOCKS,
            "windows": windows,
            "num_host_blocks": num_host_blocks,
            "num_slots": num_slots,
            "budget": budget,
            "max_num_seqs": MAX_NUM_SEQS,
            "caching": caching,
            "scheduling_policy": policy,
            "preemption_mode": mode,
            "runs_ahead": runs_ahead,
            "num_scheduler_steps": 1 if runs_ahead else num_scheduler_steps,
        }
        self.count = 0
        self.load()

    def load(self):
        """Builds an engine that knows only what the disk has."""
        self.tiers = FakeTiers(len(self.windows), self.disk)
        kind = LaunchingExecutor if self.options["runs_ahead"] else FakeExecutor
        self.executor = kind(windows=self.windows, tiers=self.tiers)
        self.executor.step_s = 0.001
        self.core = make_core(executor=self.executor, **self.options)
        self.given, self.tokens, self.finals, self.beams = {}, {}, {}, {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 60),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        salt=st.sampled_from(["", "x"]),
        n=st.integers(1, 3),
    )
    def add(self, prompt, max_tokens, priority, tenant, salt, n):
        first = str(self.count)
        self.count += 1
        for index in range(n):
            request_id = first if index == 0 else f"{first}#{index}"
            fork_of = None if index == 0 else first
            fields = {"priority": priority, "tenant": tenant, "cache_salt": salt}
            self.core.add(
                make_request(
                    request_id,
                    prompt,
                    max_tokens=max_tokens,
                    sample_index=index,
                    fork_of=fork_of,
                    **fields,
                )
            )
            self.given[request_id] = (prompt, max_tokens, index)

    @rule(
        prompt=PROMPTS,
        width=st.integers(1, MAX_NUM_SEQS + 1),
        max_tokens=st.integers(1, 40),
        penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early=st.sampled_from([True, False, "never"]),
        priority=st.integers(-1, 1),
    )
    def search(self, prompt, width, max_tokens, penalty, early, priority):
        request_id = str(self.count)
        self.count += 1
        fields = {
            "n": width,
            "beam_width": width,
            "length_penalty": penalty,
            "early_stopping": early,
            "stop_token_ids": [3],
        }
        self.core.add(
            make_request(
                request_id, prompt, max_tokens=max_tokens, priority=priority, eos=(7,), **fields
            )
        )
        self.given[request_id] = (prompt, max_tokens, fields)

    def expected_beams(self, request_id):
        """Returns what the search finds with enough memory, as long as it can get in this engine;
        None where it never fits.
        """
        prompt, max_tokens, fields = self.given[request_id]
        scheduler, width = self.core.scheduler, fields["beam_width"]
        limits = scheduler.admission.get_limits(scheduler.blocks.capacity_of(width))
        if limits.judge(len(prompt), width).status is AllocStatus.NEVER:
            return None
        room = limits.max_num_tokens(len(prompt), width) - len(prompt)
        core = make_core(num_blocks=500, budget=500)
        core.add(
            make_request(request_id, prompt, max_tokens=min(max_tokens, room), eos=(7,), **fields)
        )
        (output,) = run_all(core)[request_id]
        return output.beams

    @rule(count=st.integers(1, 40))
    def step(self, count):
        for _ in range(count):
            if self.core.has_work:
                self.take(self.core.step())

    def one_alive(self, which):
        alive = sorted(set(self.given) - set(self.finals))
        return alive[which % len(alive)] if alive else None

    @rule(which=WHICH)
    def abort(self, which):
        if request_id := self.one_alive(which):
            self.core.abort(request_id)

    @rule(which=WHICH, row_only=st.booleans())
    def fail(self, which, row_only):
        """Makes a request's next step raise, or yield NaN."""
        request_id = self.one_alive(which)
        if request_id is None:
            return
        if row_only:
            self.executor.fail_on = {request_id: "NaN"}
        else:
            self.executor.raise_on = {request_id}

    @rule(connector=st.booleans())
    def reset(self, connector):
        self.core.settle()
        holds = bool(self.core.scheduler.blocks.tables or self.core.scheduler.queues.swapped)
        assert self.core.query(ResetPrefixCache(connector)) != holds

    @rule()
    def crash(self):
        self.load()

    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "x"]), ttl_s=st.sampled_from([0, 3, 1000]))
    def pin(self, prompt, salt, ttl_s):
        """Pins as much of a prompt as is stored. A pin names known blocks alone, so nothing else
        can be pinned.
        """
        if self.disk is None or not self.options["num_slots"]:
            return
        connector = self.core.scheduler.blocks.connector
        before = dict(connector.pins)
        try:
            num_tokens = self.core.query(
                Pin(PrefixRef(prompt, salt), self.disk.now + ttl_s, self.disk.now)
            )
        except InvalidRequest:
            assert ttl_s and connector.pins == before, "there is always room for less"
            return
        assert num_tokens % 16 == 0 and num_tokens <= len(prompt)
        assert all(map(connector.knows, set(connector.pins) - set(before)))

    @rule(seconds=st.sampled_from([1, 10, 2000]))
    def wait(self, seconds):
        if self.disk is not None:
            self.disk.now += seconds

    @rule(pace=st.integers(0, 3), refuses=st.booleans(), looks=st.booleans())
    def change_the_disk(self, pace, refuses, looks):
        self.tiers.pace, self.tiers.refuses = pace, refuses
        if looks:
            self.tiers.look()

    @rule(which=WHICH, damaged=st.booleans())
    def lose_a_stored_block(self, which, damaged):
        if self.disk:
            name = sorted(self.disk)[which % len(self.disk)]
            key, tokens = self.disk.pop(name)
            if damaged:
                self.disk[name] = (key._replace(parent=b""), (9, *tokens[1:]))

    def take(self, step):
        for output in step.outputs:
            assert output.request_id not in self.finals, "nothing comes after the final output"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finals[output.request_id] = output.finish_reason
                self.beams[output.request_id] = output.beams

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.executor.fail_on, self.executor.raise_on = {}, set()
        self.tiers.pace = 3
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.take(self.core.step())
        assert set(self.finals) == set(self.given), "every request ends"
        for request_id, reason in self.finals.items():
            prompt, max_tokens, index = self.given[request_id]
            if isinstance(index, dict):
                if reason in ("stop", "length"):
                    assert self.beams[request_id] == self.expected_beams(request_id)
                continue
            expected = expected_tokens(prompt, max_tokens, index)
            tokens = self.tokens[request_id]
            assert tokens == expected[: len(tokens)]
            if reason == "length":
                assert len(tokens) == min(
                    max_tokens,
                    self.core.scheduler.admission.limits.max_num_tokens(len(prompt)) - len(prompt),
                )
        blocks = self.core.scheduler.blocks
        assert not blocks.tables and blocks.host.num_used_blocks == 0
        assert all(len(pool.free) == NUM_BLOCKS for pool in blocks.pools)


TestControlPlane = ControlPlaneMachine.TestCase
TestControlPlane.settings = settings(
    max_examples=examples(20), stateful_step_count=40, deadline=None
)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(examples(8)))
def test_long_runs(seed):
    """Runs of hundreds of requests keep the invariants, most of them with common prefixes, and a
    disk that is mostly well.
    """
    draw = random.Random(seed)
    machine = ControlPlaneMachine()
    machine.begin(
        policy=draw.choice(["fcfs", "priority", "fair"]),
        mode=draw.choice(["auto", "swap", "recompute"]),
        caching=True,
        windows=draw.choice([[None], [None, WINDOW], [WINDOW]]),
        budget=draw.choice([3, 20, 64]),
        num_host_blocks=draw.choice([0, 4, 100]),
        num_slots=draw.choice([2, 6, 50]),
        disk_blocks=draw.choice([1000, 30, 12, None]),
        runs_ahead=seed % 2 == 1,
        num_scheduler_steps=draw.choice([1, 8, 8]),
    )
    for _ in range(150):
        blocks = [draw.randrange(2) for _ in range(draw.randrange(6))]
        prompt = [token for token in blocks for _ in range(16)] + [
            draw.randrange(2) for _ in range(draw.randint(1, 10))
        ]
        machine.add(
            prompt,
            draw.randint(1, 40),
            draw.randint(-1, 1),
            draw.choice("ab"),
            draw.choice(["", "", "", "x"]),
            draw.choice([1, 1, 2]),
        )
        if draw.random() < 0.4:
            early = draw.choice([True, False, "never"])
            machine.search(
                prompt,
                draw.randint(1, MAX_NUM_SEQS),
                draw.randint(1, 40),
                draw.choice([0.0, 1.0]),
                early,
                draw.randint(-1, 1),
            )
        machine.step(draw.randint(1, 30))
        for chance, act in (
            (0.05, lambda: machine.abort(draw.randrange(100))),
            (0.02, lambda: machine.fail(draw.randrange(100), draw.random() < 0.5)),
            (0.03, lambda: machine.reset(draw.random() < 0.5)),
            (0.02, machine.crash),
            (
                0.1,
                lambda: machine.change_the_disk(
                    draw.choice([0, 1, 1, 3]), draw.random() < 0.1, draw.random() < 0.5
                ),
            ),
            (0.05, lambda: machine.lose_a_stored_block(draw.randrange(100), draw.random() < 0.5)),
            (0.1, lambda prompt=prompt: machine.pin(prompt, "", draw.choice([0, 3, 1000]))),
            (0.1, lambda: machine.wait(draw.choice([1, 10, 2000]))),
        ):
            if draw.random() < chance:
                act()
        machine.check_every_invariant()
    machine.teardown()
