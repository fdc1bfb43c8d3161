"""How much of each property a run checks: a seeded sample, ten times that, or the full counts.

`make test`, `make test-all` and `make soak` choose a tier through pytest's `--tier`; tests ask for
their number of examples here instead of naming one. Knows nothing of what is tested.
"""

from __future__ import annotations

import os
import zlib

VARIABLE = "OCTAVO_TEST_TIER"
MULTIPLES = {"sample": 1, "all": 10, "soak": 100}
"""Each tier's examples of a property, in multiples of the sample's."""


def tier() -> str:
    """Returns the tier of this run; `sample` where none was chosen."""
    return os.environ.get(VARIABLE, "sample")


def examples(sample: int) -> int:
    """Returns the number of examples that a property of `sample` examples has in this tier."""
    return sample * MULTIPLES[tier()]


def is_sampled(test_id: str, one_in: int) -> bool:
    """Tells whether this run keeps a test of which the sample holds one in `one_in` cases;
    which ones depends on their names alone.
    """
    return tier() != "sample" or zlib.crc32(test_id.encode()) % one_in == 0
