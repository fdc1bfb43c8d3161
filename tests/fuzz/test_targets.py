"""Each fuzz target reads its seeds, and damaged ones end in a refusal. `make fuzz` goes on for as
long as it is told.
"""

import contextlib
import random
import time

import pytest

from tests.fuzz.targets import MAX_S, TARGETS
from tests.support.tiers import examples

NAMES = sorted(TARGETS)


def damaged(seed: bytes, draw: random.Random) -> bytes:
    """Returns an input with a few bytes changed, a part cut out, or a part repeated."""
    content = bytearray(seed)
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 2, 8, 100]))
    match draw.randrange(4):
        case 0:
            del content[start:end]
        case 1:
            content[start:start] = content[start:end] * draw.choice([1, 3])
        case _:
            for _ in range(draw.choice([1, 2, 5])):
                content[draw.randrange(min(len(content), 4000))] = draw.choice(
                    [0, 1, 127, 255, ord("{"), ord('"'), draw.randrange(256)]
                )
    return bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_read(name):
    target = TARGETS[name]
    for seed in target.seeds():
        target.run(seed)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_inputs_are_refused(name):
    target, draw = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    for _ in range(examples(30)):
        data = damaged(draw.choice(seeds), draw)
        began = time.monotonic()
        with contextlib.suppress(*target.refusals):
            target.run(data)
        assert time.monotonic() - began < MAX_S
