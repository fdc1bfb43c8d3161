"""The gate of batches' lines: how many run at once, whom they give way to, model by model."""

import asyncio
from types import SimpleNamespace

import pytest

from octavo.config.engine_config import EngineConfig
from octavo.config.model_options import ModelOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.clients.client import ModelFacts
from octavo.server.app import create_app
from octavo.server.batch_gate import BatchGate, GatePace, PutBack
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.slot import EngineSlot

QUICK = GatePace(look_every_s=0.002, double_every_s=0.01)
FIXED = GatePace(look_every_s=0.002, double_every_s=1000)
PAUSE_S = 0.1
"""Time in which a gate of this pace has done what it will do."""


class FakeEngine:
    """An engine of which a test says how many requests it has."""

    def __init__(self, max_num_seqs=32):
        self.config = EngineConfig(
            model=ModelOptions(skip_tokenizer_init=True),
            scheduler=SchedulerOptions(max_num_seqs=max_num_seqs),
        )
        self.info = SimpleNamespace(model=ModelFacts())
        self.num_lines = 0
        self.num_others = 0
        self.num_waiting = 0

    @property
    def num_unfinished(self):
        return self.num_lines + self.num_others

    def stats(self):
        return SimpleNamespace(num_waiting=self.num_waiting)

    def check_health(self):
        """Says that all is well."""


class Lines:
    """Lines of batches on engines by name; each runs until it is let go."""

    def __init__(self, pace, settings=None, **engines):
        self.engines = engines
        slots = [EngineSlot(ModelSpec(name), engine) for name, engine in engines.items()]
        app = create_app(ModelDirectory(slots), settings or ServerSettings())
        self.models = app.state.service.models
        self.gate = BatchGate(app.state.service, pace)
        self.tasks = {name: [] for name in engines}
        self.go = asyncio.Event()

    def add(self, model, count):
        for _ in range(count):
            line = self.gate.run(self._line(self.engines[model]), model)
            self.tasks[model].append(asyncio.ensure_future(line))

    async def _line(self, engine):
        engine.num_lines += 1
        try:
            await self.go.wait()
            return "done"
        finally:
            engine.num_lines -= 1

    async def end(self):
        """Lets all lines end; returns what became of each."""
        self.go.set()
        tasks = [task for some in self.tasks.values() for task in some]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


def test_lines_on_an_idle_engine_double_up_to_half_of_its_places():
    async def run():
        lines = Lines(QUICK, tiny=FakeEngine(max_num_seqs=32))
        lines.add("tiny", 40)
        await asyncio.sleep(0.005)
        assert lines.engines["tiny"].num_lines <= 4, "the first lines start slowly"
        await asyncio.sleep(3 * PAUSE_S)
        assert lines.engines["tiny"].num_lines == 16
        assert await lines.end() == ["done"] * 40

    asyncio.run(run())


def test_the_setting_bounds_the_lines_that_run():
    async def run():
        lines = Lines(QUICK, ServerSettings(max_running_batch_lines=3), tiny=FakeEngine())
        lines.add("tiny", 10)
        await asyncio.sleep(2 * PAUSE_S)
        assert lines.engines["tiny"].num_lines == 3
        assert await lines.end() == ["done"] * 10

    asyncio.run(run())


def test_beside_other_requests_an_eighth_runs_and_none_starts_while_one_waits():
    async def run():
        engine = FakeEngine(max_num_seqs=32)
        lines = Lines(QUICK, tiny=engine)
        engine.num_others = engine.num_waiting = 1
        lines.add("tiny", 10)
        await asyncio.sleep(PAUSE_S)
        assert engine.num_lines == 0
        engine.num_waiting = 0
        await asyncio.sleep(PAUSE_S)
        assert engine.num_lines == 2
        engine.num_others = 0
        assert await lines.end() == ["done"] * 10

    asyncio.run(run())


def test_the_youngest_line_is_put_back_while_another_request_waits():
    async def run():
        engine = FakeEngine(max_num_seqs=16)
        lines = Lines(QUICK, tiny=engine)
        lines.add("tiny", 4)
        await asyncio.sleep(PAUSE_S)
        assert engine.num_lines == 4
        engine.num_others = engine.num_waiting = 1
        while engine.num_lines > 2:
            await asyncio.sleep(0.0005)
        engine.num_waiting = 0
        engine.num_others = 0
        outcomes = await lines.end()
        assert outcomes[:2] == ["done", "done"], "the oldest lines stay"
        assert all(isinstance(one, PutBack) for one in outcomes[2:])

    asyncio.run(run())


def test_the_lines_of_one_model_count_for_that_model_alone():
    """A model's places are its own, and requests of one model slow no line of another."""

    async def run():
        busy, idle = FakeEngine(max_num_seqs=16), FakeEngine(max_num_seqs=8)
        lines = Lines(QUICK, busy=busy, idle=idle)
        busy.num_others = 5
        lines.add("busy", 10)
        lines.add("idle", 10)
        await asyncio.sleep(2 * PAUSE_S)
        assert (busy.num_lines, idle.num_lines) == (1, 4)
        busy.num_waiting = 1
        await asyncio.sleep(PAUSE_S)
        assert (busy.num_lines, idle.num_lines) == (0, 4)
        busy.num_others = busy.num_waiting = 0
        outcomes = await lines.end()
        assert isinstance(outcomes[0], PutBack) and outcomes[1:] == ["done"] * 19

    asyncio.run(run())


def test_a_line_that_waits_can_be_cancelled_and_leaves_its_place():
    async def run():
        lines = Lines(FIXED, ServerSettings(max_running_batch_lines=1), tiny=FakeEngine())
        lines.add("tiny", 3)
        await asyncio.sleep(PAUSE_S)
        lines.tasks["tiny"][1].cancel()
        outcomes = await lines.end()
        assert outcomes[0] == outcomes[2] == "done"
        assert isinstance(outcomes[1], asyncio.CancelledError)

    asyncio.run(run())


@pytest.mark.parametrize("state", ["unknown", "loading"])
def test_a_line_for_a_model_that_is_not_there_runs_at_once(state):
    """Its own answer says that the model is not there."""

    async def run():
        lines = Lines(FIXED, tiny=FakeEngine())
        lines.models.add(EngineSlot(ModelSpec("loading")))

        async def answer():
            return "no such model"

        answers = [lines.gate.run(answer(), state) for _ in range(20)]
        assert set(await asyncio.wait_for(asyncio.gather(*answers), 1)) == {"no such model"}

    asyncio.run(run())
