"""Cores over the pseudo-model that a core's own process builds, with executors that misbehave."""

import os
import signal
import time

from octavo.api.errors import ConfigError
from octavo.engine.clients.client import EngineInfo
from tests.support.engine_fakes import VOCAB, FakeExecutor, FakeRow, make_core
from tests.support.fake_tiers import Disk, FakeTiers

INFO = EngineInfo(VOCAB, 512, 1024, "a fake cache")


class DyingExecutor(FakeExecutor):
    """Ends the process with the first row that it computes."""

    def execute(self, plan):
        if plan.rows:
            os._exit(7)
        return super().execute(plan)


class SlowExecutor(FakeExecutor):
    def execute(self, plan):
        time.sleep(0.01)
        return super().execute(plan)


BAD = VOCAB + 1
"""Token that makes a HangingExecutor hang and a CrashingExecutor end its process."""
SICK = VOCAB + 2
"""Token with the same effect if two requests of a step have it, and no effect in one alone."""


class HangingExecutor(FakeExecutor):
    """Hangs in a step that computes bad tokens; else a step takes 2 ms."""

    bad = BAD

    def execute(self, plan):
        for new in plan.new_rows:
            self.rows.setdefault(
                new.request_id,
                FakeRow(list(new.token_ids), new.num_prompt_tokens, new.sample_index),
            )
        tokens = [
            self.rows[row.request_id].tokens[row.start : row.start + row.num_tokens]
            for row in plan.rows
        ]
        if any(self.bad in some for some in tokens) or sum(SICK in some for some in tokens) > 1:
            self.fail()
        time.sleep(0.002)
        return super().execute(plan)

    def fail(self):
        time.sleep(3600)


class CrashingExecutor(HangingExecutor):
    """Kills its process in a step that computes bad tokens."""

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class LongExecutor(FakeExecutor):
    """Takes longer for a step than the stall timeout allows, but makes progress in it."""

    def execute(self, plan):
        for _ in range(6):
            time.sleep(0.3)
            self.progress += 1
        return super().execute(plan)


def build(options, report):
    report("loading nothing")
    kinds = {
        "die": DyingExecutor,
        "slow": SlowExecutor,
        "hang": HangingExecutor,
        "crash": CrashingExecutor,
        "long": LongExecutor,
    }
    executor = kinds.get(options.get("kind"), FakeExecutor)(tiers=FakeTiers(1, Disk()))
    if "bad" in options:
        executor.bad = options["bad"]
    return make_core(
        executor=executor, clock=time.monotonic, num_slots=options.get("num_slots", 0)
    ), INFO


def refuse(options, report):
    raise ConfigError(f"threads: got {options['threads']}, expected 1", hint="use one")


def crash(options, report):
    raise ZeroDivisionError("unexpected")


def end(options, report):
    os._exit(3)
