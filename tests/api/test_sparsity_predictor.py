"""Neurons that a predictor chooses: a request's bits never depend on its company, prompts are
computed whole, all neurons chosen are the engine that chooses none, and what cannot be is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo import LLM
from octavo.api.errors import BackendUnavailable, ConfigError, UnsupportedModel
from octavo.config.engine_config import EngineConfig
from octavo.sparsity.activation_curves import Calibration
from octavo.sparsity.activation_meter import measured_gates
from octavo.sparsity.calibrate import calibrate_model, measure_text
from octavo.sparsity.neuron_predictors import SHARES
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, make_llm, prompts_of
from tests.support.native_harness import require_native
from tests.support.sparse_rows import alone_and_together, whole_prompts
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer, tiny_model_with_text

PROMPTS = prompts_of(5, 40, 33, 17)
PARAMS = [GREEDY, SAMPLED, PENALISED, msgspec.structs.replace(SAMPLED, n=2)]
TEXT = " ".join(f"{i * i % 89} is the {i}th of them, or so they say;" for i in range(80))
RANK = 8


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def measured(**options: Any) -> Calibration:
    usual = {"model": str(tiny_model_with_text()), "backend": "native", "threads": 1}
    config = EngineConfig.from_options(**usual | options)
    return calibrate_model(
        config, TEXT, num_tokens=1536, report=lambda line: None, predictor_rank=RANK
    )


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> str:
    """Returns the file of the tiny llama's calibration, predictors included."""
    path = tmp_path_factory.mktemp("calibration") / "tiny.json"
    measured().save(path)
    return str(path)


def engine(path: str | None, **options: Any) -> LLM:
    usual: dict[str, Any] = {"backend": "native", "quantization": "int8"}
    predicted = {} if path is None else {"sparsity_predictor": path}
    return make_llm(model_path=tiny_model_with_text(), **usual | predicted | options)


def results(llm: LLM) -> list[Any]:
    return alone_and_together(llm, PROMPTS, PARAMS)


def test_a_row_alone_is_a_row_in_company(calibration, directory):
    with engine(calibration, predicted_share=0.4) as llm:
        expected = results(llm)
    assert expected[:4] == expected[4:]
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 7, "threads": 3},
        {"num_scheduler_steps": 1, "enable_prefix_caching": False},
        {"spec_method": "ngram"},
        {"weights_dir": str(directory), "weights_memory_bytes": 1 << 30},
        {
            "weights_dir": str(directory),
            "weights_memory_bytes": 1 << 30,
            "neuron_cache_bytes": 8 << 20,
        },
    ]
    for way in ways:
        with engine(calibration, predicted_share=0.4, **way) as llm:
            assert results(llm) == expected, way


@pytest.mark.parametrize("lookahead", [1, 2])
def test_what_is_foreseen_changes_no_bit(calibration, directory, lookahead):
    """Layers further on are guessed well, since a layer's input is much like the one before."""
    options = {
        "weights_dir": str(directory),
        "weights_memory_bytes": 1 << 30,
        "neuron_cache_bytes": 8 << 20,
        "neuron_window": 1,
        "predicted_share": 0.4,
    }
    with engine(calibration, **options) as llm:
        expected = results(llm)
        assert llm.get_metrics().weights.neurons_foreseen == 0
    with engine(calibration, weights_lookahead=lookahead, **options) as llm:
        assert results(llm) == expected
        found = llm.get_metrics().weights
    assert 0 < found.neurons_foreseen_used <= found.neurons_foreseen


def test_all_neurons_are_the_engine_without_a_predictor(calibration):
    with engine(None) as llm:
        expected = results(llm)
    with engine(calibration, predicted_share=1) as llm:
        assert results(llm) == expected
    with engine(calibration, predicted_share=0.3) as llm:
        assert results(llm) != expected


def test_prompts_are_computed_whole(calibration):
    pairs = whole_prompts(
        lambda: engine(None), lambda: engine(calibration, predicted_share=0.2), PROMPTS
    )
    for one, other in pairs:
        assert one.outputs[0].logprobs[1] != other.outputs[0].logprobs[1]


def test_the_reference_chooses_the_same_neurons(calibration):
    """The first token behind a prompt is computed from all neurons, the second from those chosen;
    beyond it rounded activations may lead to other tokens.
    """
    found = []
    for backend in ("native", "reference"):
        with engine(calibration, backend=backend, predicted_share=0.5) as llm:
            outputs = llm.generate(PROMPTS, msgspec.structs.replace(GREEDY, max_tokens=2))
        logprobs = [
            [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
            for output in outputs
        ]
        found.append(np.array(logprobs))
    assert np.abs(found[0] - found[1]).max() < 0.1


def test_a_predictor_finds_more_than_chance(calibration):
    found = msgspec.json.decode(Path(calibration).read_bytes(), type=Calibration)
    assert len(found.predictors) == len(found.gates)
    for each in found.predictors:
        assert each.rank == RANK and each.is_whole
        assert each.least == sorted(each.least, reverse=True)
        assert each.recall == sorted(each.recall)
        at = SHARES.index(0.3)
        assert each.recall[at] > 0.3
        assert each.least_score(0.3) == each.least[at]
        assert each.least[at + 1] < each.least_score(0.32) < each.least[at]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch": (
        {"backend": "torch"},
        "sparsity_predictor: requires the native or reference",
    ),
    "ranks": (
        {"tensor_parallel_size": 2},
        "sparsity_predictor: requires tensor_parallel_size",
    ),
    "stages": ({"pipeline_parallel_size": 2}, "not supported with sparsity_predictor"),
    "adapters": ({"enable_lora": True}, "sparsity_predictor: not supported with enable_lora"),
    "too few": ({"predicted_share": 0.01}, "predicted_share: got 0.01, expected 0.05 to 1"),
    "too many": ({"predicted_share": 1.5}, "predicted_share: got 1.5, expected 0.05 to 1"),
    "a share alone": (
        {"sparsity_predictor": None, "predicted_share": 0.3},
        "predicted_share: requires sparsity_predictor",
    ),
    "no file": ({"sparsity_predictor": "/nowhere"}, "sparsity_predictor: /nowhere: No such file"),
    "a lookahead alone": (
        {"weights_lookahead": 1},
        "weights_lookahead: requires neuron_cache_bytes",
    ),
    "floats": ({"quantization": None}, "sparsity_predictor: requires int8 weights with one scale"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_predicted_is_refused(calibration, case):
    options, message = REFUSED[case]
    with pytest.raises((ConfigError, BackendUnavailable)) as caught:
        engine(calibration, **options)
    assert message in str(caught.value)


def test_files_without_predictors_and_of_others_are_refused(calibration, tmp_path):
    found = msgspec.json.decode(Path(calibration).read_bytes(), type=Calibration)
    damaged = msgspec.structs.replace(found.predictors[0], down=b"")
    for change, message in (
        ({"predictors": []}, "the file has no predictors\nhint: create"),
        ({"fingerprint": "00"}, "it was made for other weights"),
        ({"predictors": found.predictors[1:]}, "the file has no predictor for"),
        ({"predictors": [damaged]}, "is damaged"),
    ):
        path = tmp_path / "changed.json"
        msgspec.structs.replace(found, **change).save(path)
        with pytest.raises(ConfigError) as caught:
            engine(str(path))
        assert message in str(caught.value)


def test_models_without_gates_are_refused(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("opt", vocab_size=300).path, path)
    save_tiny_tokenizer(path)
    with pytest.raises(UnsupportedModel, match="has no gates to predict"):
        measured(model=str(path))


def test_what_is_wanted_is_what_neurons_add():
    """A llama's |silu(gate) * up| meets the down matrix and is observed there."""
    config = EngineConfig.from_options(model=str(tiny_model_with_text()), backend="reference")
    seen = measure_text(config, TEXT, num_tokens=256, report=lambda line: None)
    next(seen.windows)
    weights = {weight.name: weight for weight in seen.program.weights}
    for name, gate in measured_gates(seen.program, seen.observed.inputs).items():
        assert gate.last == weights[name.replace("gate_proj", "down_proj")]
        rows = seen.observed.inputs[gate.maker.weights_[0]][:20]
        opened = rows @ seen.floats(weights[name]).T
        up = rows @ seen.floats(weights[name.replace("gate_proj", "up_proj")]).T
        expected = np.abs(opened / (1 + np.exp(-opened)) * up)
        assert np.allclose(np.abs(seen.observed.inputs[gate.last][:20]), expected, atol=1e-5)
