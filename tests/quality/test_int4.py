"""Quality of int4 made at load, from weights that no grid of 32 neighbours fits already.

SmolLM2's file is Q4_1, whose grid packing at load finds again. So its channels are put in another
order first (`tests/support/shuffled_model.py`).
"""

from pathlib import Path

import pytest

from octavo.checkpoint.catalogue import resolve
from tests.quality.test_smollm2 import perplexity_script

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]


def rise(model: Path, num_windows: int | None, **options: str) -> float:
    found = perplexity_script().measure(num_windows, model=str(model), **options)
    return found["rise_percent"]


def rise_when_shuffled(shuffled: Path, num_windows: int | None, **options: str) -> float:
    return rise(shuffled, num_windows, tokenizer=str(resolve("smollm2")), **options)


@pytest.mark.slow
def test_the_order_of_channels_changes_nothing(shuffled: Path) -> None:
    assert abs(rise_when_shuffled(shuffled, 1, dtype="float32")) < 0.01


@pytest.mark.slow
def test_int4_of_three_windows(shuffled: Path) -> None:
    assert 1.0 < rise_when_shuffled(shuffled, 3, quantization="int4") <= 5.5, (
        "below 1% the file's own grid was found again"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "bound_percent"), [("int4", 5.0), ("int8", 1.0)])
def test_of_the_whole_text(shuffled: Path, quantization: str, bound_percent: float) -> None:
    """The rise of perplexity over the whole text is what docs/concepts/numbers.md promises of int4,
    within a percent.
    """
    assert rise_when_shuffled(shuffled, None, quantization=quantization) <= bound_percent


@pytest.mark.slow
def test_gemma3() -> None:
    """Gemma 3, from the other grid of Q4_K and Q6_K, stays close to the same file dequantised."""
    assert rise(resolve("gemma3-270m"), 6, reference="float32", quantization="int4") <= 5.0
