"""`octavo bench quant`: a row for each way to store the weights, against FP16."""

import json

import pytest

from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

SMALL = ("--threads=1", "--kv-cache-memory-bytes=64MiB", "--max-model-len=128", "--max-num-seqs=8")
WORK = ("--window=32", "--windows=2", "--num-prompts=2", "--input-len=6", "--output-len=4")
TEXTS = ("--calibration-texts=4", "--calibration-length=32", "--rounds=1")


@pytest.fixture
def model(tmp_path):
    """The directory of a tiny model whose rows have whole groups of 32."""
    import shutil

    path = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 278}
    shutil.copytree(tiny_model("llama", **sizes).path, path)
    save_tiny_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Light is a thing that moves, and is bent where it meets glass. " * 8)
    return file


def test_a_row_for_each(octavo, model, text, tmp_path):
    """Sizes fall with the bits, and quantised models are kept for a later run."""
    rows = "--only=INT8,RTN,GPTQ,AWQ,W8A8"
    kept = f"--made={tmp_path / 'made'}"
    texts = (f"--text={text}", f"--calibration={text}")
    ended = octavo("bench", "quant", model, *texts, rows, kept, *WORK, *TEXTS, *SMALL, "--json")
    assert ended.code == 0, ended.err
    found = {row["name"]: row for row in json.loads(ended.out)["rows"]}
    assert list(found) == ["FP16", "INT8", "RTN", "GPTQ", "AWQ", "W8A8"]
    sizes = {name: row["weight_bytes"] for name, row in found.items()}
    assert sizes["GPTQ"] < sizes["W8A8"] < sizes["FP16"] and sizes["INT8"] < sizes["FP16"]
    for row in found.values():
        assert row["tokens_per_s"] > 0
        assert 0.5 < row["perplexity"] / found["FP16"]["perplexity"] < 2
    assert {each.name for each in (tmp_path / "made").iterdir()} == {
        *(f"{name}-g32" for name in ("RTN", "GPTQ", "AWQ", "W8A8")),
        "figures.jsonl",
        "made.json",
    }
    again = octavo("bench", "quant", model, *texts, "--only=AWQ", kept, *WORK, *TEXTS, *SMALL)
    assert again.code == 0, again.err
    lines = again.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["FP16", "AWQ"]
    assert "100%" in lines[1] and "1.00x" in lines[1] and "+0.0%" in lines[1]


def test_rows_of_an_earlier_run_are_taken(octavo, model, text, tmp_path):
    """With --resume what the directory has of the same work is not measured once more; what
    --prepare has quantised is there as well.
    """
    kept = f"--made={tmp_path / 'made'}"
    prepared = octavo("bench", "quant", model, f"--text={text}", kept, "--only=RTN", "--prepare")
    assert prepared.code == 0 and prepared.out == "", prepared.err
    assert {each.name for each in (tmp_path / "made").iterdir()} == {"RTN-g32", "made.json"}
    (tmp_path / "other").symlink_to(model)
    again = ("bench", "quant", tmp_path / "other", f"--text={text}", kept, "--prepare")
    assert octavo(*again, "--only=RTN").code == 0, "the same model by another name"
    texts = (f"--calibration={text}", "--calibration-texts=4", "--calibration-length=32")
    ended = octavo(*again, "--only=RTN", *texts)
    assert ended.code == 2 and "RTN-g32 was quantized from another model" in ended.err
    given = ("bench", "quant", model, f"--text={text}", kept, "--resume", *WORK, *SMALL, "--json")
    rows = []
    for only in ("INT8", "INT8,RTN", "INT8,RTN"):
        ended = octavo(*given, f"--only={only}", "--rounds=1")
        assert ended.code == 0, ended.err
        rows.append({row["name"]: row for row in json.loads(ended.out)["rows"]})
        with (tmp_path / "made" / "figures.jsonl").open("a") as file:
            file.write('["cut sh')
    assert [list(each) for each in rows] == [["FP16", "INT8"]] + [["FP16", "INT8", "RTN"]] * 2
    assert rows[1]["INT8"] == rows[0]["INT8"] and rows[2] == rows[1]
    other = octavo(*given, "--only=INT8", "--rounds=2")
    assert "measuring INT8" in other.err, "another work"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only=INT3",), "only: got 'INT3'"),
        (("--only=AWQ",), "calibration: AWQ requires a text"),
        (("--only=INT8", "--prepare"), "prepare: requires a directory"),
    ],
)
def test_rows_that_cannot_be_made(octavo, model, text, arguments, message):
    ended = octavo("bench", "quant", model, f"--text={text}", *arguments)
    assert ended.code == 2 and message in ended.err
