"""`octavo models` lists what can be run, and says from headers what a model is."""

import json
import time
from math import prod

import pytest

from octavo.checkpoint import catalogue
from octavo.models.registry import FAMILIES, build_programs
from octavo.wiring.survey import make_report
from tests.support.slowness import slowness
from tests.support.tiny_models import tiny_model

LARGE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
    "max_position_embeddings": 40_960,
}
"""Sizes of Qwen3-30B-A3B."""


def test_the_list_names_every_family_format_and_short_name(octavo):
    done = octavo("models")
    assert done.code == 0
    lines = done.out.splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= {
        *FAMILIES,
        *catalogue.names(),
        "safetensors",
        "GGUF",
    }
    found = json.loads(octavo("models", "--json").out)
    assert [row["model_type"] for row in found["families"]] == list(FAMILIES)
    assert "Q4_K" in found["formats"]["GGUF"]


def test_a_model_is_described_from_its_headers(octavo):
    report = make_report("smollm2")
    assert report.info.model_type == "llama" and report.num_parameters == 134_515_008
    assert report.formats == {"Q4_1": 106_168_320, "Q8_0": 28_311_552, "F32": 35_136}
    assert report.has_tokenizer and report.has_chat_template and report.runs
    assert [verdict.unsupported_reason for verdict in report.verdicts] == [None, None]
    done = octavo("models", "smollm2")
    assert done.code == 0
    assert done.out.startswith("smollm2: llama, 134.5 M parameters, 93.8 MiB\n")
    assert "✓ native         supported\n" in done.out


@pytest.mark.alone
def test_headers_of_a_large_model_are_read_within_a_second(tmp_path):
    """48 layers of 128 experts, 18,867 tensors in eight files, of which no byte of a weight is
    there.
    """
    config = tiny_model("qwen3_moe").config | LARGE
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_headers(tmp_path, build_programs(config).values(), num_files=8)
    began = time.process_time()
    report = make_report(str(tmp_path))
    took = time.process_time() - began
    assert report.num_parameters > 30e9 and report.formats.keys() == {"BF16"}
    assert took < slowness()


def save_headers(folder, programs, num_files):
    """Writes safetensors files of bf16 that are holes but for their headers."""
    shapes = {
        name: weight.shape[1:] if weight.sources else weight.shape
        for program in programs
        for weight in program.weights
        for name in weight.tensor_names
    }
    names = list(shapes)
    for index in range(num_files):
        entries, end = {}, 0
        for name in names[index::num_files]:
            start, end = end, end + 2 * prod(shapes[name])
            entries[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
        header = json.dumps(entries).encode()
        with (folder / f"model-{index + 1:05}-of-{num_files:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)


def test_a_backend_that_refuses_says_why(tmp_path):
    file = tmp_path / "config.json"
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    file.write_text(json.dumps(tiny_model("llama").config | {"quantization_config": fp8}))
    verdicts = {
        verdict.backend: verdict.unsupported_reason for verdict in make_report(str(file)).verdicts
    }
    assert "F8_E4M3:16" in verdicts["native"]
    assert verdicts["torch"] is None and verdicts["reference"] is None


def test_what_cannot_run_is_one_sentence_and_exit_code_2(octavo, tmp_path):
    config = tiny_model("llama").config
    for changes, said in (
        ({"model_type": "lama"}, "model type 'lama' is not supported"),
        ({"attention_warp": 2}, "attention_warp = 2 is unknown for llama"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config | changes))
        done = octavo("models", str(file))
        assert done.code == 2 and done.out == ""
        assert said in done.err and "Traceback" not in done.err


def test_a_short_name_that_is_not_fetched_is_not_fetched_to_be_described(
    octavo, tmp_path, monkeypatch
):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    done = octavo("models", "gemma3-270m")
    assert done.code == 2
    assert "is not downloaded yet" in done.err and "octavo pull gemma3-270m" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_config_json_alone_is_enough(family, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_model(family).config))
    report = make_report(str(file))
    assert report.has_tokenizer is None and report.num_bytes == 0 and report.runs
