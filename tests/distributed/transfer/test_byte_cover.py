"""Which bytes have come, beside a set of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.transfer.block_fetcher import ByteCover

RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=12,
)


@given(RANGES)
def test_bytes_are_counted_once(ranges: list[tuple[int, int]]) -> None:
    cover, seen = ByteCover(), set[int]()
    for start, end in ranges:
        cover.add(start, end)
        seen.update(range(start, end))
        assert cover.num_bytes == len(seen)
