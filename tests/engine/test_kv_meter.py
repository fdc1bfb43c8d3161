"""What is used of the KV memory that is reserved, in numbers that can be counted by hand: blocks of
16 tokens, 100 bytes a block.
"""

from __future__ import annotations

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.kv_meter import KvMeter
from octavo.engine.protocol.stats import EngineStats, KvBytes
from tests.support.engine_fakes import FakeExecutor, make_core, make_request


def make(
    executor: FakeExecutor | None = None, *, block_bytes: tuple[int, ...] = (100,), **options
) -> EngineCore:
    core = make_core(executor=executor, num_groups=len(block_bytes), **options)
    meter = KvMeter(block_bytes, max_model_len=250)
    return EngineCore(core.scheduler, core.executor, kv_meter=meter)


def test_a_prompt_in_chunks_then_tokens():
    core = make(budget=20)
    core.add(make_request("a", list(range(40)), max_tokens=3))
    seen = [core.step().stats.kv for _ in range(4)]
    assert [kv.used for kv in seen] == pytest.approx(
        [100 * tokens / 16 for tokens in (20, 40, 41, 42)]
    )
    assert {(kv.reserved, kv.whole_contexts) for kv in seen} == {(300, 1600)}, (
        "blocks for the whole prompt, from the start on"
    )
    assert core.step().stats.kv == seen[-1], "steps that compute nothing do not count"
    sums = core.step().stats.kv_sums
    assert sums.utilisation == pytest.approx((20 + 40 + 41 + 42) / 4 / 48)


def test_groups_add_up():
    core = make(block_bytes=(100, 10))
    core.add(make_request("a", list(range(24))))
    assert core.step().stats.kv == KvBytes(24 / 16 * 110, 220, 16 * 110)


def test_shared_blocks_are_counted_once():
    core = make()
    core.add(make_request("a", list(range(32)), max_tokens=20))
    core.step()
    core.add(make_request("b", [*range(32), 7], max_tokens=20))
    kv = core.step().stats.kv
    assert (
        kv.reserved == 400
        and kv.used == pytest.approx((32 + 1 + 1) / 16 * 100)
        and kv.whole_contexts == 3200
    )


def test_what_a_window_has_passed_is_neither_used_nor_reserved():
    core = make(FakeExecutor(windows=[16]), windows=[16])
    core.add(make_request("a", list(range(40)), max_tokens=20))
    core.step()
    kv = core.step().stats.kv
    assert kv.reserved == 200 and kv.used == pytest.approx((41 - 16) / 16 * 100)


def test_the_worker_knows_better_where_it_gives_memory_on_demand():
    class Giving(FakeExecutor):
        def execute(self, plan):
            result = super().execute(plan)
            result.kv_bytes = 1234
            return result

    core = make(Giving())
    core.add(make_request("a", [1, 2, 3]))
    assert core.step().stats.kv.reserved == 1234


def test_sums_go_on_where_a_core_is_replaced():
    earlier, later = (
        EngineStats(kv_sums=KvBytes(1, 2, 3)),
        EngineStats(kv=KvBytes(5, 6, 7), kv_sums=KvBytes(10, 20, 30)),
    )
    stats = later.after(earlier)
    assert (stats.kv, stats.kv_sums) == (KvBytes(5, 6, 7), KvBytes(11, 22, 33))
    assert KvBytes().utilisation == 0
