"""`octavo plan MODEL` predicts the memory of a model, and suggests flags that make it fit."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from safetensors.numpy import load_file

from octavo.checkpoint.open import open_checkpoint
from octavo.cli.app import build_app
from octavo.cli.common import suggested_flags as suggested_module
from octavo.cli.common.suggested_flags import suggested_flags
from octavo.config.engine_config import EngineConfig, option_fields
from octavo.config.option import convert
from octavo.config.sizes import format_bytes
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.disk import measure_disk
from octavo.wiring.engine import build_in_process
from octavo.worker.machine import Machine, NumaNode
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_encoders import save_encoder
from tests.support.tiny_images import FAMILIES, seeing_model
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.sampled(one_in=2)

GIVEN = ("--bandwidth=1G", "--flops=1T")


@pytest.fixture
def config(tmp_path):
    """A folder with only the config.json of a large model."""
    values = {
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def planned(octavo, *arguments):
    ended = octavo("plan", *arguments, *GIVEN, "--json")
    return ended, json.loads(ended.out)


def test_a_config_alone(octavo, config):
    """The model has 8.03 billion parameters in bf16, and K and V of 8 heads of 128 numbers in 32
    layers: 128 KiB a token.
    """
    ended, found = planned(octavo, config, "--memory=80GiB")
    assert ended.code == 0 and ended.err == ""
    assert found["num_parameters"] == 8_030_261_248
    assert found["weight_bytes"] == pytest.approx(2 * found["num_parameters"], rel=1e-3)
    assert (found["kv_token_bytes"], found["kv_dtype"]) == (131072, "bf16")
    longest = found["rows"][-1]
    assert (
        longest["context"] == 131072
        and longest["request_kv_bytes"] == 16 << 30
        and longest["requests"] == 3
    )
    assert found["rows"][0]["decode_tokens_per_s"] == pytest.approx(1e9 / 1.6e10, rel=0.1), (
        "memory bound, at 1 GB/s"
    )
    assert found["flags"][0].startswith(
        "--kv-cache-memory-bytes="
    ) and "--max-model-len" not in " ".join(found["flags"])


def test_a_rank_of_two(octavo, config):
    """One of two ranks holds half of every matrix and of the KV heads, and whole norms."""
    ranks = ("--backend=torch", "--device=cpu", "--tensor-parallel-size=2")
    ended, found = planned(octavo, config, "--memory=40GiB", *ranks)
    _, whole = planned(octavo, config, "--memory=80GiB", *ranks[:2])
    assert ended.code == 0 and found["num_parameters"] == whole["num_parameters"]
    assert found["weight_bytes"] == pytest.approx(whole["weight_bytes"] / 2, rel=1e-3)
    assert found["kv_token_bytes"] == whole["kv_token_bytes"] / 2
    ended = octavo("plan", str(config), "-tp", "48", *ranks[:2], *GIVEN)
    assert (
        ended.code == 2
        and "tensor_parallel_size: got 48, but the model has only 32 attention heads" in ended.err
    )


def test_the_shortfall(octavo, config):
    ended, found = planned(octavo, config, "--memory=12GiB")
    assert (
        ended.code == 1
        and f"{config} does not fit: " in ended.err
        and "GiB are missing" in ended.err
    )
    needed = (
        found["weight_bytes"]
        + found["step_bytes"]
        + found["process_bytes"]
        + found["least_kv_bytes"]
    )
    assert found["shortfall_bytes"] == needed - (12 << 30)
    assert found["flags"][0] == "--quantization=int8" and found["flags"][1].startswith(
        "--max-model-len="
    )
    flags = [flag for flag in found["flags"] if not flag.startswith("--max-num-seqs")]
    ended, again = planned(octavo, config, "--memory=12GiB", *flags)
    assert ended.code == 0 and again["shortfall_bytes"] == 0, "the flags do what they promise"
    assert planned(octavo, config, "--memory=16GiB")[1]["flags"][0].startswith(
        "--max-model-len="
    ), "a shorter context suffices"
    ended, found = planned(octavo, config, "--memory=2GiB")
    assert ended.code == 1 and found["flags"] == []
    assert "no options make it fit" in octavo("plan", config, "--memory=2GiB", *GIVEN).out


def test_smaller_steps_where_the_weights_just_fit(octavo, config):
    """A model that some flags make fit is never called too large, and the printed flags suffice."""
    least = planned(
        octavo,
        config,
        "--memory=80GiB",
        "--quantization=int4",
        "--max-num-batched-tokens=128",
        "--max-model-len=64",
    )[1]
    fixed = sum(least[name] for name in ("weight_bytes", "step_bytes", "process_bytes"))
    for spare, flag in (
        (400 << 20, "--max-num-batched-tokens=512"),
        (60 << 20, "--max-num-batched-tokens=128"),
    ):
        memory = f"--memory={fixed + spare}"
        ended, found = planned(octavo, config, memory)
        assert (
            ended.code == 1
            and found["flags"][0] == "--quantization=int4"
            and flag in " ".join(found["flags"])
        )
        ended, again = planned(octavo, config, memory, *found["flags"])
        assert ended.code == 0 and again["shortfall_bytes"] == 0
    assert planned(octavo, config, f"--memory={fixed}")[1]["flags"] == []


def test_a_kv_cache_that_was_asked_for_and_does_not_fit(octavo, config):
    ended, found = planned(octavo, config, "--memory=12GiB", "--kv-cache-memory-bytes=11GiB")
    assert ended.code == 1 and found["flags"] == []
    found = planned(octavo, config, "--memory=12GiB", "--kv-cache-memory-bytes=3GiB")[1]
    assert found["flags"][0] == "--quantization=int8"


def test_what_is_not_served_is_not_planned(octavo, tmp_path):
    message = "model type 'rwkv' is not supported"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "hidden_size": 768}))
    ended = octavo("plan", tmp_path, *GIVEN)
    assert ended.code == 2 and message in ended.err and ended.out == ""


def test_int4_of_a_config_alone(octavo, config):
    """The matrix v keeps 8 bits in every layer, down in the first and last 4 and in 8 of the 24
    between; the untied head has 4.
    """
    found = planned(octavo, config, "--memory=80GiB", "--quantization=int4")[1]
    layer = {
        "q": 4096 * 4096,
        "k": 1024 * 4096,
        "o": 4096 * 4096,
        "gate": 14336 * 4096,
        "up": 14336 * 4096,
    }
    value, down, table = 1024 * 4096, 14336 * 4096, 128256 * 4096
    four = 32 * sum(layer.values()) + 16 * down + table
    eight = 32 * value + 16 * down + table
    assert found["weight_bytes"] == pytest.approx(four * 5 / 8 + eight, rel=2e-3)
    bits = found["weight_bytes"] * 8 / found["num_parameters"]
    assert 5.2 < bits < 6.2 and found["code"] == "u4"


def test_int4_that_cannot_be_is_refused_and_not_suggested(octavo, config):
    values = json.loads((config / "config.json").read_text()) | {"intermediate_size": 14300}
    (config / "config.json").write_text(json.dumps(values))
    ended = octavo("plan", config, "--quantization=int4", *GIVEN)
    assert (
        ended.code == 2
        and "down_proj.weight has 14300 inputs, expected a multiple of 32" in ended.err
    )
    assert "hint: use --quantization int8" in ended.err
    assert planned(octavo, config, "--memory=12GiB")[1]["flags"][0] == "--quantization=int8"
    assert planned(octavo, config, "--memory=7GiB")[1]["flags"] == [], (
        "int4 would fit, but cannot be"
    )


def test_what_is_planned_is_what_is_loaded(octavo, monkeypatch):
    """Plan, check before loading and packed weights agree on the bytes of the weights."""
    path = tiny_model("llama", **WIDTHS_OF_32["llama"], num_hidden_layers=9).path
    sizes, prepared, prepare_program = [], [], NativeBackend.prepare_program

    def recorded(*arguments):
        prepared.append(prepare_program(*arguments))
        return prepared[-1]

    monkeypatch.setattr(NativeBackend, "prepare_program", recorded)
    for quantization in ("int4", "int8", None):
        options = {} if quantization is None else {"quantization": quantization}
        flags = [f"--{name}={value}" for name, value in options.items()]
        found = planned(octavo, path, "--memory=8GiB", "--threads=1", *flags)[1]
        said = []
        config = EngineConfig.from_options(
            model=str(path),
            skip_tokenizer_init=True,
            threads=1,
            kv_cache_memory_bytes="16MiB",
            **options,
        )
        build_in_process(config, said.append).client.close()
        assert prepared[-1].weight_bytes == found["weight_bytes"]
        assert any(f"weights {format_bytes(found['weight_bytes'])}" in line for line in said)
        sizes.append(found["weight_bytes"])
    assert sizes == sorted(set(sizes))


def values_of(spec):
    """Yields values of an option, other than its default."""
    if spec.type is bool:
        yield not spec.entry.default
    elif spec.choices:
        yield from (choice for choice in spec.choices if choice != spec.entry.default)
    elif spec.is_list:
        yield ("a=b", "c d")
    elif spec.number is not None:
        yield spec.number(max(3, spec.entry.metadata["low"] or 0))
        if spec.entry.metadata["unit"] == "bytes":
            yield 5 << 30
    else:
        yield "it's a path"


@pytest.mark.parametrize("name", sorted(option_fields().keys() - {"model"}))
def test_the_suggested_command_keeps_every_option_that_was_given(monkeypatch, name):
    """What `octavo serve` reads from the suggested command is what `octavo plan` was given."""
    monkeypatch.setattr(suggested_module, "suggested_options", lambda *_: {"max_num_seqs": 2})
    command = typer.main.get_command(build_app(["plan", "serve"]))
    spec = option_fields()[name]
    for value in values_of(spec):
        flags = suggested_flags(None, 0, {name: value})
        line = shlex.split(shlex.join(["smollm2", *flags]))
        given = command.commands["serve"].make_context("serve", line).params
        read = {key: convert(option_fields()[key], given[key]) for key in (name, "max_num_seqs")}
        assert read == {"max_num_seqs": 2, **({} if name == "max_num_seqs" else {name: value})}


def test_the_suggested_command_is_complete(octavo, config, tmp_path):
    given = ["--kv-cache-dtype=int8", "--max-num-seqs=3", "--no-enable-prefix-caching"]
    streamed = ["--weights-memory-bytes=3GiB", f"--weights-dir={tmp_path / 'a dir'}"]
    for more in (streamed, ["--tensor-parallel-size=2"]):
        rates = (*GIVEN, "--disk-bandwidth=1G")
        ended = octavo("plan", config, "--memory=20GiB", *given, *more, *rates)
        (line,) = [line for line in ended.out.splitlines() if line.startswith("try: ")]
        words = shlex.split(line.removeprefix("try: "))
        assert words[:3] == ["octavo", "serve", str(config)] and {*given, *more} <= set(words)


def test_for_people(octavo, config):
    out = octavo("plan", config, "--memory=80GiB", *GIVEN).out
    assert "llama, 8,030 M parameters, context 131,072" in out
    assert "weights           15.0 GiB  16.0 bits per parameter, mostly bf16" in out
    assert f"try: octavo serve {config} --kv-cache-memory-bytes=" in out


def test_two_nodes_get_an_engine_each(octavo, config, monkeypatch):
    """Weights of 16 GB fit in a node of 64 GiB, but not in one of 16 GiB."""
    for gibibytes, flag in ((64, "--data-parallel-size 2"), (16, "--tensor-parallel-size 2")):
        nodes = [NumaNode(index, frozenset(), 48, gibibytes << 30) for index in range(2)]
        monkeypatch.setattr(Machine, "nodes", lambda self, nodes=nodes: nodes)
        plan = octavo("plan", str(config), *GIVEN, "--memory=512GiB").out
        (line,) = (line for line in plan.splitlines() if line.startswith("NUMA: "))
        assert line.startswith("NUMA: 2 nodes of 48 cores: one ")
        assert line.endswith(f"; plan again with {flag}")
    given = octavo("plan", str(config), *GIVEN, "--memory=512GiB", "--tensor-parallel-size=2").out
    assert "NUMA" not in given, "a layout that is given is kept"


def test_measured_here(octavo):
    path = tiny_model("llama").path
    ended = octavo("plan", path, "--json", "--threads=1")
    found = json.loads(ended.out)
    assert ended.code == 0 and found["bandwidth"] > 1e8 and found["flops"] > 1e8
    assert found["memory_bytes"] == pytest.approx(Machine().available_bytes(), rel=0.3)


STREAMED = "--weights-memory-bytes=4GiB"


def test_streamed_weights_are_bound_by_the_disk(octavo, config, tmp_path):
    """A model of 16 GB that may take 4 GiB of memory reads some 12 GB for each step."""
    options = (config, "--memory=80GiB", STREAMED, f"--weights-dir={tmp_path}")
    ended, found = planned(octavo, *options, "--disk-bandwidth=2G")
    assert ended.code == 0 and found["weight_bytes"] <= 4 << 30
    assert 11.5e9 < found["streamed_bytes"] < 13.5e9
    disk_bound = octavo("plan", *options, "--bandwidth=1T", "--flops=1P", "--disk-bandwidth=2G")
    assert f"{2e9 / found['streamed_bytes']:.3g} steps/s" in disk_bound.out
    fast, slow = (
        json.loads(octavo("plan", *options, *limits, "--json").out)["rows"][0]
        for limits in (
            ("--bandwidth=1T", "--flops=1P", "--disk-bandwidth=2G"),
            ("--bandwidth=1T", "--flops=1P", "--disk-bandwidth=1G"),
        )
    )
    expected = 2e9 / found["streamed_bytes"]
    assert fast["decode_tokens_per_s"] == pytest.approx(expected)
    assert slow["decode_tokens_per_s"] == pytest.approx(expected / 2)
    assert fast["batch_tokens_per_s"] == pytest.approx(expected * fast["batch"])


def test_a_better_split_of_streamed_weights_is_shown(octavo, config, tmp_path):
    """Requests of 2,048 tokens have 256 MiB of K and V each: many fit where 4 did."""
    options = (config, "--memory=80GiB", "--weights-memory-bytes=9GiB", "--max-model-len=4096")
    options += (f"--weights-dir={tmp_path}", "--kv-cache-memory-bytes=1GiB", "--disk-bandwidth=2G")
    ended, found = planned(octavo, *options)
    split = found["split"]
    assert ended.code == 0 and split["requests"] > 16 and split["context"] == 2048
    memory_bytes = split["weights_bytes"] + split["kv_bytes"]
    assert memory_bytes == found["weight_bytes"] + (1 << 30)
    given = next(row for row in found["rows"] if row["context"] == 2048)
    assert split["tokens_per_s"] > 2 * given["batch_tokens_per_s"]
    ended = octavo("plan", *options, *GIVEN)
    assert f"{split['requests']} requests of 2,048 tokens, at most" in ended.out
    other = ["--weights-memory-bytes", str(split["weights_bytes"])]
    other += ["--kv-cache-memory-bytes", str(split["kv_bytes"])]
    ended, found = planned(octavo, *options, *other)
    assert found["split"] is None and found["streamed_bytes"] <= split["streamed_bytes"] * 1.05


def test_neurons_are_planned_without_a_calibration(octavo, config, tmp_path):
    """Two of three matrices of a layer lie in records: 32 layers, 14,336 neurons of 8 KiB."""
    ended, found = planned(
        *(octavo, config, "--memory=80GiB", STREAMED, f"--weights-dir={tmp_path}"),
        *("--quantization=int8", "--ffn-sparsity=gate:0.5", "--calibration=none.json"),
        *("--neuron-cache-bytes=2GiB", "--disk-bandwidth=2G"),
    )
    assert ended.code == 0, ended.err
    assert found["neuron_bytes"] == 32 * 14336 * 8192
    assert found["weight_bytes"] <= 4 << 30
    gates_and_attention = 32 * 4096 * (14336 + 2 * 4096 + 2 * 1024)
    assert found["streamed_bytes"] < gates_and_attention


def test_the_disk_is_measured_and_nothing_left_on_it(tmp_path):
    directory = Path(__file__).parents[2] / "build" / tmp_path.name
    rates = measure_disk(directory, scratch_bytes=4 << 20, seconds=0.02)
    assert list(directory.iterdir()) == []
    directory.rmdir()
    if rates is not None:  # a file system without direct reads is not measured
        assert rates.in_order > 1e6 and all(rate > 1e5 for rate in rates.random.values())
        assert list(rates.random) == [4096, 16384, 65536, 524288]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory=many"], "--memory: got 'many', expected a number of bytes such as"),
        (["--flops=0"], "--flops: got '0', expected a number above 0 such as 50G or 1.5T"),
        (["--bandwidth=5X"], "--bandwidth: got '5X', expected"),
        (
            [*GIVEN, STREAMED, "--weights-dir=build", "--disk-bandwidth=x"],
            "--disk-bandwidth: got 'x', expected",
        ),
    ],
)
def test_bad_numbers(octavo, config, flags, message):
    ended = octavo("plan", config, *flags)
    assert ended.code == 2 and message in ended.err


def test_serve_refuses_what_does_not_fit_before_it_loads(octavo, tmp_path, monkeypatch):
    """The refusal reads no weight: the file holds a header and nothing sound after it."""
    shutil.copytree(tiny_model("llama").path, tmp_path / "model")
    monkeypatch.setattr(Machine, "available_bytes", lambda self: 100 << 20)
    monkeypatch.setattr(
        type(open_checkpoint(tmp_path / "model")),
        "tensor",
        lambda self, name: pytest.fail("a weight was read"),
    )
    ended = octavo(
        "bench", "latency", f"--model={tmp_path / 'model'}", "--skip-tokenizer-init", "--threads=1"
    )
    assert (
        ended.code == 2 and "does not fit: requires" in ended.err and "MiB are missing" in ended.err
    )


def test_an_encoder_keeps_no_kv_and_runs_as_many_texts_as_may_run(octavo):
    ended, found = planned(octavo, "minilm", "--max-num-seqs=40")
    assert ended.code == 0
    assert [row["requests"] for row in found["rows"]] == [40]
    assert "--max-num-seqs=40" in found["flags"]


def test_states_are_planned_for_each_request_and_checkpoint(octavo):
    path = tiny_model("mamba2").path
    _, found = planned(octavo, path, "--memory=8GiB")
    one = 3 * 2 * 6 * 16 * 12 * 4  # two states of 6 heads of 16 columns and 12 numbers, padded
    assert one < found["state_bytes"] < 4 * one
    assert found["checkpoint_tokens"] == 256
    text = octavo("plan", path, "--memory=8GiB", *GIVEN).out
    assert "per request" in text and "every 256 tokens and at the end of a prompt" in text
    off = octavo("plan", path, "--memory=8GiB", *GIVEN, "--no-enable-prefix-caching")
    assert off.code == 0 and "checkpoint" not in off.out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_of_images_counts(octavo, family):
    """Its weights are among those predicted, and so are the rows of the largest image."""
    path = seeing_model(family).path
    _, found = planned(octavo, path, "--memory=8GiB")
    tensors = load_file(path / "model.safetensors").items()
    read = [tensor.size for name, tensor in tensors if ".head." not in name]  # SigLIP's pooling
    assert found["num_parameters"] == sum(read)
    _, small = planned(octavo, path, "--memory=8GiB", "--max-image-tokens=4")
    assert small["weight_bytes"] == found["weight_bytes"] > 0
    if family != "gemma3":  # whose images have one size
        assert small["step_bytes"] < found["step_bytes"]


def test_an_encoder_generates_nothing(octavo, tmp_path):
    ended = octavo("plan", save_encoder(tmp_path, "bert"), "--memory=4GiB", *GIVEN)
    assert ended.code == 0 and "tokens/s" in ended.out
    assert "decode" not in ended.out and "--kv-cache-memory-bytes" not in ended.out


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_encoders_before_decoders_have_plans(octavo, family):
    """No packing or step is suggested that such a model refuses."""
    ended, found = planned(octavo, tiny_model(family).path, "--memory=4GiB")
    assert ended.code == 0 and ended.err == ""
    assert found["flags"] and not any("int4" in flag for flag in found["flags"])
