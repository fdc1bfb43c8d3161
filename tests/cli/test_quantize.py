"""`octavo quantize`: the command makes a model that the engine runs, and says what it cannot do."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
    assert "matrices quantized" in ended.out and "1 stay as they are: lm_head" in ended.out
    assert f"{made}: 21 matrices, 128 calibration tokens" in ended.err
    with LLM(str(output), report=lambda line: None, max_model_len=64, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        answer = llm.generate("Light is", params)[0]
    assert len(answer.outputs[0].token_ids) == 4
    again = octavo("quantize", model, "-o", output, *options, *TEXTS)
    assert again.code == 2 and f"output: {output} exists" in again.err


def test_a_result_that_is_larger_than_a_quantized_source_is_a_warning(octavo, model, tmp_path):
    """Floats become smaller; codes of 4 bits whose scales are shared by fewer inputs do not."""
    first = octavo("quantize", model, "-o", tmp_path / "a", "--method=rtn", "--group=32")
    assert first.code == 0 and "WARNING" not in first.err
    options = ("--method=rtn", "--group=16", "--bits=8")
    again = octavo("quantize", tmp_path / "a", "-o", tmp_path / "b", *options)
    assert again.code == 0, again.err
    assert re.search(r"WARNING: the result has \S+ KiB, the source only \S+ KiB", again.err)
    assert "quantize the original model" in again.err


@pytest.mark.model
def test_quantization_at_load_that_makes_weights_larger_is_a_warning(octavo, model):
    words = ("run", "--raw", "--max-tokens=1", "--max-model-len=64", "--threads=1", "Hello")
    larger = octavo(*words, "--model=smollm2", "--quantization=int8").err
    assert re.search(
        r"WARNING: --quantization int8 makes the weights larger: \S+ MiB in memory, 93\.8 MiB in",
        larger,
    )
    assert "WARNING" not in octavo(*words, f"--model={model}", "--quantization=int8").err


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_needs_no_option_and_keeps_its_sampling_values(octavo, tmp_path):
    ended = octavo("quantize", "smollm2", "-o", tmp_path / "made")
    assert ended.code == 0 and "210 matrices quantized" in ended.out, ended.err
    assert (
        "round-to-nearest (rtn); for higher accuracy use gptq with --calibration TEXT" in ended.err
    )
    assert "one scale for groups of 64 inputs" in ended.err
    answer = octavo("run", tmp_path / "made", "Name the capital of France.", "--max-tokens=12")
    assert "Paris" in answer.out
    assert "temperature 0, repetition_penalty 1.05" in answer.err


def test_a_gguf_file_keeps_the_sampling_values_of_its_source(octavo, model, tmp_path):
    values = {"temperature": 0.7, "top_p": 0.95, "top_k": -1, "max_new_tokens": 99}
    (model / "generation_config.json").write_text(json.dumps(values))
    (model / "tokenizer.json").unlink()
    expected = {
        ("max_tokens" if name == "max_new_tokens" else name): values[name] for name in values
    }
    options = {"max_model_len": 64, "skip_tokenizer_init": True, "report": lambda line: None}
    for source, made in ((model, "a"), (tmp_path / "a", "b")):
        words = ("-o", tmp_path / made, "--method=rtn", "--format=gguf", "--bits=8")
        ended = octavo("quantize", source, *words)
        assert ended.code == 0, ended.err
        with LLM(str(tmp_path / made), **options) as llm:
            assert llm.frontend.sampling.values == expected


@pytest.mark.slow
@pytest.mark.model
def test_a_gguf_file_of_a_catalogue_model_keeps_its_recommended_sampling_values(octavo, tmp_path):
    options = ("--method=rtn", "--format=gguf", "--bits=4")
    ended = octavo("quantize", "smollm2", "-o", tmp_path / "made", *options)
    assert ended.code == 0, ended.err
    shown = octavo("show", tmp_path / "made" / "model.gguf").out
    assert "temperature 0, repetition_penalty 1.05, max_tokens 1024" in shown


def test_a_buffer_of_whole_numbers_is_left_out(octavo, model, tmp_path):
    file = model / "model.safetensors"
    tensors = load_file(file)
    buffer = {"model.embeddings.position_ids": np.arange(8, dtype=np.int64)[None]}
    save_file(tensors | buffer, file)
    ended = octavo("quantize", model, "-o", tmp_path / "made", "--group=32")
    assert ended.code == 0, ended.err
    assert not buffer.keys() & load_file(tmp_path / "made" / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method=gptq",), "--method gptq --calibration TEXT (a file similar"),
        (("--method=rtn", "--bits=7"), "bits: got 7"),
        (("--method=rtn", "--bits=8", "--zero-point"), "zero-point: compressed-tensors of 8 bits"),
        (("--method=rtn", "--bits=6", "--format=gguf", "--zero-point"), "zero-point: gguf of 6"),
        (("--method=awq", "--calibration=TEXT"), "expected at least 512"),
        (("--method=rtn", "--format=gguf", "--bits=3"), "bits: got 3"),
        (("--method=rtn", "--group=50"), "group: 50 does not divide the 64 inputs"),
    ],
)
def test_what_cannot_be_done(octavo, model, text, tmp_path, options, message):
    given = [option.replace("TEXT", str(text)) for option in options]
    ended = octavo("quantize", model, "-o", tmp_path / "made", *given)
    assert ended.code == 2 and message in ended.err, ended.err
    assert not list(tmp_path.glob("made*"))
