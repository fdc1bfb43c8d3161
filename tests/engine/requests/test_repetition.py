"""An answer that repeats itself ends with the token that makes it so. All exact."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.repetition_detection import RepetitionDetection
from tests.support.tiers import examples


def repeats(ids: list[int], rule: RepetitionDetection) -> bool:
    """Returns whether the list ends with a pattern in a row, one comparison after the other."""
    least = max(1, rule.min_pattern_size)
    return any(
        len(ids) >= size * rule.min_count
        and all(ids[-1 - i] == ids[-1 - i % size] for i in range(size * rule.min_count))
        for size in range(least, rule.max_pattern_size + 1)
    )


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(2, 4),
)
def test_a_repetition_is_what_a_slow_search_finds(prompt, answer, most, least, count):
    rule = RepetitionDetection(
        max_pattern_size=most, min_pattern_size=min(least, most), min_count=count
    )
    assert rule.matches(prompt + answer, len(prompt)) == repeats(answer, rule)
