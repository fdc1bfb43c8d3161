"""What adapters of SmolLM2 lose in few bits, under two that PEFT trained on a book for a few steps
(`benchmarks/adapter_precision.py`, the figures of the guide).
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800), pytest.mark.slow]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str | None, str], dict[str, Any]]:
    """Returns figures of one window by adapter and precision, of a base in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        script = importlib.import_module("adapter_precision")
    work = script.train_adapters("smollm2", 16, 8, tmp_path_factory.mktemp("adapters"))
    found = script.measure(work, "float32", script.judged_windows("smollm2", 1))
    return {
        (row["adapter"], row.get("lora_dtype", row.get("engine", "base"))): row for row in found
    }


@pytest.mark.parametrize("adapter", ["all", "q, v"])
def test_int8_adapters(rows: dict[tuple[str | None, str], dict[str, Any]], adapter: str) -> None:
    """An adapter in int8 keeps what training gained: perplexity within 0.1% of float32's, of which
    Octavo and PEFT compute the same.
    """
    base, exact, int8 = rows[None, "base"], rows[adapter, "float32"], rows[adapter, "int8"]
    assert exact["perplexity"] < 0.97 * base["perplexity"]
    assert abs(int8["rise_percent"]) < 0.1
    assert int8["difference"] < 5e-3
    assert rows[adapter, "peft"]["difference"] < 1e-4
