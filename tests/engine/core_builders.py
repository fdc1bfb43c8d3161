"""What a core's own process is told to build in these tests."""

import os
import time

from octavo.engine.client import EngineInfo
from octavo.errors import ConfigError
from tests.engine.fakes import VOCAB, FakeExecutor, make_core

INFO = EngineInfo(VOCAB, 512, 1024, "a fake cache")


class DyingExecutor(FakeExecutor):
    def execute(self, plan):
        if plan.rows:
            os._exit(7)
        return super().execute(plan)


class SlowExecutor(FakeExecutor):
    def execute(self, plan):
        time.sleep(0.01)
        return super().execute(plan)


def build(options, report):
    report("loading nothing")
    kinds = {"die": DyingExecutor, "slow": SlowExecutor}
    return make_core(executor=kinds.get(options.get("kind"), FakeExecutor)()), INFO


def refuse(options, report):
    raise ConfigError(f"threads: got {options['threads']}, allowed is 1", hint="use one")


def crash(options, report):
    raise ZeroDivisionError("unexpected")


def end(options, report):
    os._exit(3)
