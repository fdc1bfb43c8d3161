"""The offload pass: every weight has one place, within the memory that was allowed, and what a
range of stages reads lies side by side.
"""

import random
import re
from itertools import combinations

import pytest

from octavo.api.errors import ConfigError
from octavo.program.passes.offload import ALIGN, OffloadPlan, Schedule, Unit, plan_offload

OTHER_BYTES = 5 * ALIGN
SCHEDULES: tuple[Schedule, ...] = ("pinned", "layers")


def some_units(seed: int) -> list[Unit]:
    """Returns the products of some layers, which share ranges as the executor groups them, and a
    head that may be much larger.
    """
    draw = random.Random(seed)
    num_layers = draw.randint(1, 6)
    sizes = [draw.randint(1, 9) * ALIGN for _ in range(4)]
    units = [
        Unit(f"{layer}.{part}", size, 2 * layer + (part > 0))
        for layer in range(num_layers)
        for part, size in enumerate(sizes)
    ]
    return [*units, Unit("head", draw.randint(1, 60) * ALIGN, units[-1].range)]


def planned(units: list[Unit], allowed_bytes: int, schedule: Schedule) -> OffloadPlan:
    return plan_offload(
        units, allowed_bytes=allowed_bytes, other_bytes=OTHER_BYTES, schedule=schedule
    )


def least_bytes(units: list[Unit]) -> int:
    with pytest.raises(ConfigError, match="two layers") as caught:
        planned(units, 1, "pinned")
    found = re.search(r"set weights_memory_bytes to (\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(40))
def test_every_unit_has_one_place_within_the_memory_allowed(seed, schedule):
    units = some_units(seed)
    least, total = least_bytes(units), sum(unit.num_bytes for unit in units)
    for allowed in (least, least + 7 * ALIGN + 5, (least + OTHER_BYTES + total) // 2):
        plan = planned(units, allowed, schedule)
        assert plan.memory_bytes <= allowed - OTHER_BYTES
        chunks = [*plan.resident, *plan.streamed]
        assert sorted(index for chunk in chunks for index in chunk.units) == [*range(len(units))]
        order = [index for chunk in plan.streamed for index in chunk.units]
        assert order == sorted(order), "chunks are read in the order of the step"
        for one, other in combinations(chunks, 2):
            apart = (
                one.offset + one.num_bytes <= other.offset
                or other.offset + other.num_bytes <= one.offset
            )
            shares_ring = one in plan.streamed and other in plan.streamed
            same_range = units[one.units[0]].range == units[other.units[0]].range
            assert apart or (shares_ring and not same_range)


def test_an_output_layer_that_makes_the_ring_large_is_kept_first():
    """Ten layers of 10 pages and a head of 40: with 70 pages the ring takes 20 and the head 40."""
    layers = [Unit(str(index), 10 * ALIGN, 2 * index) for index in range(10)]
    units = [*layers, Unit("head", 40 * ALIGN, 18)]
    plan = planned(units, OTHER_BYTES + 70 * ALIGN, "pinned")
    assert plan.ring_bytes == 20 * ALIGN
    assert [chunk.units for chunk in plan.resident][-1] == range(10, 11)
    assert plan.step_bytes == 90 * ALIGN
