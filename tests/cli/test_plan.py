"""`octavo plan MODEL`."""

import json
import shutil

import pytest

from octavo.checkpoint.open import open_checkpoint
from octavo.worker.machine import Machine
from tests.tiny_models import tiny_model

GIVEN = ("--bandwidth=1G", "--flops=1T")


@pytest.fixture
def config(tmp_path):
    """Nothing but a config.json: a large model of which no weight is here."""
    values = {
        "model_type": "llama", "dtype": "bfloat16", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 5e5,
        "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def planned(octavo, *arguments):
    ended = octavo("plan", *arguments, *GIVEN, "--json")
    return ended, json.loads(ended.out)


def test_a_config_alone(octavo, config):
    """8.03 billion parameters in bf16; K and V of 8 heads of 128 numbers, 32 layers: 128 KiB a token."""
    ended, found = planned(octavo, config, "--memory=80GiB")
    assert ended.code == 0 and ended.err == ""
    assert found["num_parameters"] == 8_030_261_248
    assert found["weight_bytes"] == pytest.approx(2 * found["num_parameters"], rel=1e-3)
    assert (found["kv_token_bytes"], found["kv_dtype"]) == (131072, "bf16")
    longest = found["rows"][-1]
    assert longest["context"] == 131072 and longest["request_kv_bytes"] == 16 << 30 and longest["requests"] == 3
    assert found["rows"][0]["decode_tokens_per_s"] == pytest.approx(1e9 / 1.6e10, rel=0.1), "memory bound, at 1 GB/s"
    assert found["flags"][0].startswith("--kv-cache-memory-bytes=") and "--max-model-len" not in " ".join(found["flags"])


def test_the_shortfall(octavo, config):
    ended, found = planned(octavo, config, "--memory=12GiB")
    assert ended.code == 1 and f"{config} does not fit: " in ended.err and "GiB are missing" in ended.err
    needed = found["weight_bytes"] + found["step_bytes"] + found["process_bytes"] + found["least_kv_bytes"]
    assert found["shortfall_bytes"] == needed - (12 << 30)
    assert found["flags"][0] == "--quantization=int8" and found["flags"][1].startswith("--max-model-len=")
    flags = [flag for flag in found["flags"] if not flag.startswith("--max-num-seqs")]
    ended, again = planned(octavo, config, "--memory=12GiB", *flags)
    assert ended.code == 0 and again["shortfall_bytes"] == 0, "the flags do what they promise"
    assert planned(octavo, config, "--memory=16GiB")[1]["flags"][0].startswith("--max-model-len="), "a shorter context suffices"
    ended, found = planned(octavo, config, "--memory=2GiB")
    assert ended.code == 1 and found["flags"] == []
    assert "no options make it fit" in octavo("plan", config, "--memory=2GiB", *GIVEN).out


def test_for_people(octavo, config):
    out = octavo("plan", config, "--memory=80GiB", *GIVEN).out
    assert "llama, 8,030 million parameters, context 131,072" in out
    assert "weights           15.0 GiB  16.0 bits a parameter, mostly bf16" in out
    assert f"try: octavo serve {config} --kv-cache-memory-bytes=" in out


def test_measured_here(octavo):
    path = tiny_model("llama").path
    ended = octavo("plan", path, "--json", "--threads=1")
    found = json.loads(ended.out)
    assert ended.code == 0 and found["bandwidth"] > 1e8 and found["flops"] > 1e8
    assert found["memory_bytes"] == pytest.approx(Machine().available_bytes(), rel=0.3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory=many"], "--memory: got 'many', allowed is a number of bytes such as"),
        (["--flops=0"], "--flops: got '0', allowed is a number above 0 such as 50G or 1.5T"),
        (["--bandwidth=5X"], "--bandwidth: got '5X', allowed is"),
    ],
)
def test_bad_numbers(octavo, config, flags, message):
    ended = octavo("plan", config, *flags)
    assert ended.code == 2 and message in ended.err


def test_serve_says_it_before_it_loads(octavo, tmp_path, monkeypatch):
    """No weight is read: the file holds a header and nothing sound besides."""
    shutil.copytree(tiny_model("llama").path, tmp_path / "model")
    monkeypatch.setattr(Machine, "available_bytes", lambda self: 100 << 20)
    monkeypatch.setattr(type(open_checkpoint(tmp_path / "model")), "tensor", lambda self, name: pytest.fail("a weight was read"))
    ended = octavo("bench", "latency", f"--model={tmp_path / 'model'}", "--skip-tokenizer-init", "--threads=1")
    assert ended.code == 2 and "does not fit: needed are" in ended.err and "MiB are missing" in ended.err
