"""`octavo quantize`: the command makes a model that the engine runs, and says what it cannot do."""

import shutil

import pytest

from octavo import LLM, SamplingParams
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

TEXTS = ("--calibration-texts=4", "--calibration-length=32")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 278}


@pytest.fixture
def model(tmp_path):
    """The directory of a tiny model whose rows have whole groups of 32."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama", **SIZES).path, path)
    save_tiny_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Light is a thing that moves, and is bent where it meets glass. " * 4)
    return file


@pytest.mark.parametrize("made", ["awq", "gptq"])
def test_a_model_is_made_and_runs(octavo, model, text, tmp_path, made):
    output = tmp_path / "made"
    options = (f"--method={made}", f"--format={made}", "--group=32", f"--calibration={text}")
    ended = octavo("quantize", model, "-o", output, *options, *TEXTS)
    assert ended.code == 0, ended.err
    assert "matrices quantised" in ended.out and "1 stay as they are: lm_head" in ended.out
    assert f"{made}: 21 matrices, 128 calibration tokens" in ended.err
    with LLM(str(output), report=lambda line: None, max_model_len=64, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        answer = llm.generate("Light is", params)[0]
    assert len(answer.outputs[0].token_ids) == 4
    again = octavo("quantize", model, "-o", output, *options, *TEXTS)
    assert again.code == 2 and f"output: {output} exists" in again.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method=gptq",), "calibration: gptq needs a text"),
        (("--method=rtn", "--bits=7"), "bits: got 7"),
        (("--method=rtn", "--bits=8", "--zero-point"), "zero-point: compressed-tensors of 8 bits"),
        (("--method=rtn", "--bits=6", "--format=gguf", "--zero-point"), "zero-point: gguf of 6"),
        (("--method=awq", "--calibration=TEXT"), "needed are at least 512"),
        (("--method=rtn", "--format=gguf", "--bits=3"), "bits: got 3"),
        (("--method=rtn", "--group=50"), "group: 50 does not divide the 64 inputs"),
    ],
)
def test_what_cannot_be_done(octavo, model, text, tmp_path, options, message):
    given = [option.replace("TEXT", str(text)) for option in options]
    ended = octavo("quantize", model, "-o", tmp_path / "made", *given)
    assert ended.code == 2 and message in ended.err, ended.err
    assert not list(tmp_path.glob("made*"))
