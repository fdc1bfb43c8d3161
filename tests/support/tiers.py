"""How much of each property a run checks: a seeded sample, ten times that, or the full counts.

`make test`, `make test-all` and `make soak` choose a tier through pytest's `--tier`; tests ask for
their number of examples here instead of naming one. Knows nothing of what is tested.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import TypeVar

Test = TypeVar("Test")

VARIABLE = "OCTAVO_TEST_TIER"
MULTIPLES = {"sample": 1, "all": 10, "soak": 100}
"""Each tier's examples of a property, in multiples of the sample's."""


def tier() -> str:
    """Returns the tier of this run; `sample` where none was chosen."""
    return os.environ.get(VARIABLE, "sample")


def examples(sample: int) -> int:
    """Returns the number of examples that a property of `sample` examples has in this tier."""
    return sample * MULTIPLES[tier()]


def sample(tests: Mapping[Test, tuple[str, int]]) -> list[Test]:
    """Returns the tests that this run keeps, of tests with their ids and the number of which the
    sample holds one; which ones depends on the ids alone.

    At least one case of each function is kept; a function without cases may be left out whole.
    """
    if tier() != "sample":
        return list(tests)
    rests = {test: zlib.crc32(name.encode()) % one_in for test, (name, one_in) in tests.items()}
    least: dict[str, int] = {}
    for test, (name, _) in tests.items():
        function, is_case, _ = name.partition("[")
        if is_case:
            least[function] = min(rests[test], least.get(function, rests[test]))
    return [
        test for test, (name, _) in tests.items() if rests[test] == least.get(name.split("[")[0], 0)
    ]
