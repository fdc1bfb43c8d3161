"""Feed-forward weights read neuron by neuron: the bits of the engine that holds all weights, what
is read and what stays, what is refused before anything is loaded, and what happens where a file
cannot be read.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from octavo import LLM
from octavo.api.errors import BackendUnavailable, ConfigError, EngineDead
from octavo.config.engine_config import EngineConfig
from octavo.program.passes.fuse import fuse
from octavo.sparsity.activation_curves import Calibration
from octavo.sparsity.calibrate import calibrate_model
from octavo.sparsity.neurons import split_neurons
from octavo.wiring.model import open_model
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.native_harness import require_native
from tests.support.tiny_models import TinyModel, double_precision, in_float64, tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer, tiny_model_with_text

PARAMS = [GREEDY, SAMPLED, PENALISED, GREEDY]
PROMPTS = prompts_of(5, 40, 33, 90)
MODELS: dict[str, dict[str, Any]] = {
    "opt": {},
    "nemotron": {"hidden_act": "relu2"},
    "llama": {"hidden_act": "relu"},
}
"""Families with a plain relu, a squared one, and a gate of relu."""

TEXT = " ".join(f"{i * i % 89} is the {i}th of them, or so they say;" for i in range(40))

ALL = 1 << 40
"""Memory for all weights."""


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def measured(model: Path) -> Calibration:
    config = EngineConfig.from_options(model=str(model), backend="native", threads=1)
    return calibrate_model(config, TEXT, num_tokens=512, report=lambda line: None)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> str:
    """Returns the file of the tiny llama's calibration."""
    path = tmp_path_factory.mktemp("calibration") / "tiny.json"
    measured(tiny_model_with_text()).save(path)
    return str(path)


@pytest.fixture(scope="module")
def with_relu(tmp_path_factory) -> tuple[TinyModel, Path, Path]:
    """Returns a tiny llama with gates of relu, its folder with a tokenizer, and its calibration."""
    path = tmp_path_factory.mktemp("relu") / "model"
    tiny = tiny_model("llama", hidden_act="relu", vocab_size=300)
    shutil.copytree(tiny.path, path)
    save_tiny_tokenizer(path)
    measured(path).save(path / "calibration.json")
    return tiny, path, path / "calibration.json"


def resident(family: str, **options: Any) -> LLM:
    path = tiny_model(family, **MODELS[family]).path
    return make_llm(model_path=path, **{"backend": "native", "quantization": "int8"} | options)


def by_neurons(family: str, directory: Path, cache: int, memory: int = ALL, **options: Any) -> LLM:
    usual = {
        "ffn_sparsity": "exact",
        "weights_dir": str(directory),
        "weights_memory_bytes": memory,
        "neuron_cache_bytes": cache,
    }
    return resident(family, **usual | options)


def least_bytes(option: str, refused: pytest.ExceptionInfo[ConfigError]) -> int:
    found = re.search(rf"set {option} to (\d+) or more", str(refused.value))
    assert found is not None, refused.value
    return int(found[1])


def least_cache(family: str, directory: Path) -> int:
    """Returns the least cache with which a family runs, as its refusal says."""
    with pytest.raises(ConfigError, match=r"two layers of neurons") as caught:
        by_neurons(family, directory, 1)
    return least_bytes("neuron_cache_bytes", caught)


def results(llm: LLM) -> list[Any]:
    """Returns the results of each prompt alone, of two together, then of all."""
    return [
        fingerprint(output)
        for some in ([0], [1], [2], [3], [0, 1], [0, 1, 2, 3])
        for output in llm.generate([PROMPTS[i] for i in some], [PARAMS[i] for i in some])
    ]


@pytest.mark.parametrize("family", MODELS)
def test_neurons_give_the_resident_engines_bits(family, directory):
    with resident(family) as llm:
        expected = results(llm)
    least = least_cache(family, directory)
    with pytest.raises(ConfigError, match="weights that always stay in memory") as caught:
        by_neurons(family, directory, least, least + 1)
    memory = least_bytes("weights_memory_bytes", caught)
    ways: list[dict[str, Any]] = [
        {},
        {"memory": memory},
        {"threads": 3, "neuron_window": 2},
        {"cache": ALL - 1, "max_num_batched_tokens": 7},
    ]
    for way in ways:
        with by_neurons(family, directory, **{"cache": least} | way) as llm:
            assert results(llm) == expected, way


def test_small_gates_give_the_bits_of_the_engine_that_holds_them(calibration, directory):
    """Generated rows remove gates, prompts do not; alone, in company and in chunks."""
    options: dict[str, Any] = {
        "model_path": tiny_model_with_text(),
        "backend": "native",
        "quantization": "int8",
        "calibration": calibration,
        "ffn_sparsity": "gate:0.6",
    }
    with make_llm(**options) as llm:
        expected = results(llm)
    options |= {"weights_dir": str(directory), "weights_memory_bytes": ALL}
    for way in (
        {"neuron_cache_bytes": 8 << 20},
        {"neuron_cache_bytes": 8 << 20, "neuron_window": 1, "max_num_batched_tokens": 7},
        {"neuron_cache_bytes": 8 << 20, "activation_sparsity": 0.2},
    ):
        if "activation_sparsity" in way:
            with make_llm(**options | way | {"neuron_cache_bytes": None}) as llm:
                expected = results(llm)
        with make_llm(**options | way) as llm:
            assert results(llm) == expected, way


def test_neurons_of_the_last_tokens_are_found(directory):
    """A cache for all reads each neuron once; with a window, those that were not used are read
    again."""
    least = least_cache("llama", directory)
    with by_neurons("llama", directory, ALL - 1) as llm:
        llm.generate(PROMPTS, GREEDY)
        first = llm.get_metrics().weights
        llm.generate(PROMPTS, GREEDY)
        again = llm.get_metrics().weights
    assert first.neurons_read > 0 and first.neurons_found > 0
    assert again.neurons_read == first.neurons_read and again.num_bytes == first.num_bytes
    assert again.neurons_found > 2 * first.neurons_found - 1
    read = []
    for window in (1, 4):
        with by_neurons("llama", directory, ALL - 1, neuron_window=window) as llm:
            llm.generate([PROMPTS[0]], GREEDY)
            read.append(llm.get_metrics().weights.neurons_read)
    assert read[0] > read[1] >= first.neurons_read // 8
    with by_neurons("llama", directory, least) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.get_metrics().weights.neurons_read > first.neurons_read


def test_timings_have_a_requests_share(directory):
    with by_neurons("llama", directory, least_cache("llama", directory)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        whole = llm.get_metrics().weights
    shares = [output.timings for output in outputs]
    assert all(each is not None and each.neurons_read > 0 for each in shares)
    for name, total in (
        ("streamed_bytes", whole.num_bytes),
        ("neurons_found", whole.neurons_found),
        ("neurons_read", whole.neurons_read),
    ):
        assert sum(getattr(each, name) for each in shares) == pytest.approx(total, abs=200)


def test_a_calibration_counts_the_neurons_of_its_text(with_relu, calibration):
    """Neurons behind a relu are counted as transformers' model in float64 has them."""
    tiny, path, file = with_relu
    network, counts = in_float64(tiny.model), {}

    def count(name: str, used: torch.Tensor) -> None:
        counts[name] = counts.get(name, 0) + used[0].sum(0).numpy()

    for name, module in network.named_modules():
        if name.endswith("down_proj"):
            module.register_forward_pre_hook(
                lambda _, inputs, name=f"{name}.weight": count(name, inputs[0] != 0)
            )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids[:512]
    with double_precision():
        for window in np.array(token_ids).reshape(-1, 256):
            network(torch.tensor(window)[None])
    found = msgspec.json.decode(file.read_bytes(), type=Calibration)
    assert [layer.weight for layer in found.neurons] == list(counts)
    for layer in found.neurons:
        np.testing.assert_allclose(layer.counts, counts[layer.weight], atol=1)
        hottest = layer.hottest(5)
        assert min(layer.counts[n] for n in hottest) >= sorted(layer.counts)[-5]
    found = msgspec.json.decode(Path(calibration).read_bytes(), type=Calibration)
    for layer in found.neurons:
        assert sum(layer.counts) == 512 * round(0.3 * len(layer.counts))


def test_hot_neurons_stay_and_change_no_bit(with_relu, directory):
    _, path, file = with_relu
    with make_llm(model_path=path, backend="native", quantization="int8") as llm:
        expected = results(llm)
    found = {}
    for hot in (None, str(file)):
        with by_neurons("llama", directory, 5 << 20, model=str(path), hot_neurons=hot) as llm:
            assert results(llm) == expected
            found[hot] = llm.get_metrics().weights
    assert found[str(file)].neurons_found > 0
    assert found[str(file)] != found[None]


def test_hot_neurons_of_other_weights_are_refused(with_relu, calibration, directory, tmp_path):
    _, path, file = with_relu
    old = tmp_path / "old.json"
    whole = msgspec.json.decode(file.read_bytes(), type=Calibration)
    msgspec.structs.replace(whole, neurons=[]).save(old)
    cut = tmp_path / "cut.json"
    msgspec.structs.replace(whole, neurons=whole.neurons[1:]).save(cut)
    for hot, message in (
        (calibration, "hot_neurons: .* it was made for other weights"),
        (old, "hot_neurons: .* it has no neuron data"),
        (cut, r"hot_neurons: the file has no data for the \d+ inputs of model.layers.0.mlp.down"),
        (tmp_path / "none.json", "hot_neurons: .* No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            by_neurons("llama", directory, 5 << 20, model=str(path), hot_neurons=str(hot))


def test_a_read_error_fails_the_steps_requests_and_no_later_ones(directory):
    with by_neurons("llama", directory, least_cache("llama", directory)) as llm:
        expected = results(llm)
        (path,) = directory.glob("*.weights")
        numbers = [
            int(link.name)
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and os.path.realpath(link) == str(path.resolve())
        ]
        kept = {number: os.dup(number) for number in numbers}
        reader, writer = os.pipe()
        try:
            for number in numbers:
                os.dup2(reader, number)
            where = rf"could not be read from {re.escape(str(path))} at byte \d+: Illegal seek"
            failed = llm.generate(PROMPTS, GREEDY)
            assert all(re.search(where, str(output.error)) for output in failed), failed
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
            os.close(reader)
            os.close(writer)
        assert results(llm) == expected


def test_a_file_that_becomes_shorter_ends_the_engine(directory):
    with by_neurons("llama", directory, least_cache("llama", directory)) as llm:
        results(llm)
        (path,) = directory.glob("*.weights")
        os.truncate(path, 4096)
        with pytest.raises(EngineDead, match=r"the file of weights ends too early: .*at byte \d+"):
            results(llm)


def test_weights_whose_sums_have_an_order_are_refused(directory):
    with pytest.raises(
        BackendUnavailable, match="neuron_cache_bytes: requires int8 weights with one scale"
    ):
        by_neurons("llama", directory, 64 << 20, quantization=None)


def test_a_model_whose_zeros_say_nothing_is_refused():
    config = EngineConfig.from_options(model=str(tiny_model("llama").path), backend="native")
    program = open_model(config).program()
    with pytest.raises(ConfigError, match=r"neuron_cache_bytes: .* has no feed-forward layer"):
        split_neurons(fuse(program))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_memory_bytes": None, "weights_dir": None}, "requires weights_memory"),
        ({"ffn_sparsity": None}, "neuron_cache_bytes: requires ffn_sparsity"),
        ({"enable_lora": True}, "neuron_cache_bytes: not supported with enable_lora"),
        ({"weights_memory_bytes": 1 << 20}, "expected less than weights_memory_bytes, 1.0 MiB"),
        (
            {"neuron_cache_bytes": None, "neuron_window": 5},
            "neuron_window: requires neuron_cache_bytes",
        ),
        (
            {"neuron_cache_bytes": None, "hot_neurons": "x"},
            "hot_neurons: requires neuron_cache_bytes",
        ),
        (
            {"backend": "reference"},
            "ffn_sparsity: requires the native backend, got 'reference'",
        ),
        (
            {"tensor_parallel_size": 2},
            "weights_memory_bytes: requires tensor_parallel_size 1, got 2",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, tmp_path):
    usual = {
        "backend": "native",
        "quantization": "int8",
        "ffn_sparsity": "exact",
        "weights_dir": str(tmp_path),
        "weights_memory_bytes": 64 << 20,
        "neuron_cache_bytes": 8 << 20,
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(model_path=tiny_model("llama", hidden_act="relu").path, **usual | options)
