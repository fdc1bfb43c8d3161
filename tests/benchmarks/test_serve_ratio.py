"""benchmarks/serve_ratio.py: both ways to the same engine, timed in turns, with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import tiny_model_with_text

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_ratio.py"
SIZES = ("--rounds=2", "--requests=3", "--prompt=9", "--output=5")


@pytest.mark.slow
def test_a_ratio_for_each_work_and_options():
    plain = {"backend": "reference", "max_model_len": 64, "kv_cache_memory_bytes": "1MiB"}
    options = [json.dumps(plain), json.dumps(plain | {"num_scheduler_steps": 1})]
    command = [
        sys.executable,
        SCRIPT,
        f"--model={tiny_model_with_text()}",
        *SIZES,
        *(f"--options={one}" for one in options),
    ]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    machine, *rows = map(json.loads, ended.stdout.splitlines())
    assert machine["requests"] == 3 and machine["machine"]
    results, summaries = rows[:16], rows[16:]
    assert {(row["work"], row["options"], row["way"]) for row in results} == {
        (work, one, way)
        for work in ("single", "batch")
        for one in options
        for way in ("generate", "serve")
    }
    assert all(row["tokens_per_second"] > 0 for row in results)
    assert all(
        {"client", "front", "core"} <= set(row["cpu_us_per_token"])
        for row in results
        if row["way"] == "serve"
    )
    assert [(row["work"], row["options"]) for row in summaries] == [
        (work, one) for work in ("single", "batch") for one in options
    ]
    for row in summaries:
        assert (
            0 < row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
            and row["inter_token_ms"]["p99"] >= 0
        )
