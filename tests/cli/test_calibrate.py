"""`octavo calibrate` writes what options need, `octavo simulate ndp` says that it measures nothing,
and both refuse texts that they cannot use.
"""

from __future__ import annotations

import json

import pytest

from tests.support.native_harness import require_native
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture(autouse=True)
def native():
    require_native()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{i * i % 97} and {i}" for i in range(60)))
    return path


def test_a_calibration_is_what_the_options_need(octavo, text, tmp_path):
    out, model = tmp_path / "found.json", tiny_model_with_text()
    ended = octavo("calibrate", str(model), f"--text={text}", f"--out={out}", "--backend=native")
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{out}: ") and "matmul inputs" in ended.out
    assert not list(tmp_path.glob("*.part"))
    ended = octavo(
        *("run", "abc", f"--model={model}", "--backend=native", "--max-tokens=4"),
        *(f"--calibration={out}", "--activation-sparsity=0.5", "--ffn-sparsity=gate:0.25"),
        *("--threads=1", "--max-model-len=256", "--kv-cache-memory-bytes=64MiB"),
    )
    assert ended.code == 0, ended.err
    assert (
        "approximate: in generated tokens, 50% of the matmul inputs (uniform) and 25% of the"
        " gates are treated as zero" in ended.err
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text: "),
        (b"too short", "expected at least 256"),
        (b"\xff\xfe" * 400, "text: "),
    ],
)
def test_texts_that_cannot_be_used_are_refused(octavo, tmp_path, content, message):
    path, out = tmp_path / "text.txt", tmp_path / "found.json"
    if content is not None:
        path.write_bytes(content)
    ended = octavo(
        *("calibrate", str(tiny_model_with_text()), f"--text={path}", f"--out={out}"),
        "--backend=native",
    )
    assert ended.code != 0 and message in ended.err and not out.exists()


def test_a_simulation_says_that_it_is_one(octavo, text):
    arguments = ("simulate", "ndp", str(tiny_model_with_text()), f"--text={text}", "--tokens=256")
    ended = octavo(*arguments, "--backend=native", "--modules=4", "--window=64")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("simulation, nothing measured: ")
    ended = octavo(*arguments, "--backend=native", "--modules=4", "--window=64", "--json")
    rows = json.loads(ended.out)["simulation"]
    assert {row["window"] for row in rows} == {0, 64} and len(rows) == 18
    faster = [row["tokens_per_s"] for row in rows if row["window"] == 0 and row["skew"] == 0]
    assert faster == sorted(faster) and faster[0] < faster[-1]
