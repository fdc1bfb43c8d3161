"""Small numbers that are treated as zero in generated tokens: a request's bits never depend on its
company, prompts are computed whole, and what generated tokens leave in the cache is not found
again.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import SamplingParams
from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.executor.native.weight_file import get_file_system
from octavo.sparsity.activation_curves import Calibration
from octavo.sparsity.calibrate import calibrate_model
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    alone,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.native_harness import require_native
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer, tiny_model_with_text

PROMPTS = prompts_of(5, 40, 33, 17)
PARAMS = [GREEDY, SAMPLED, PENALISED, msgspec.structs.replace(SAMPLED, n=2)]
TEXT = " ".join(f"{i * i % 89} is the {i}th of them, or so they say;" for i in range(40))
KINDS: dict[str, dict[str, Any]] = {
    "inputs": {"activation_sparsity": 0.5},
    "gates": {"ffn_sparsity": "gate:0.5"},
    "both": {"activation_sparsity": 0.3, "ffn_sparsity": "gate:0.3"},
    "greedy": {"activation_sparsity": 0.4, "activation_sparsity_plan": "greedy"},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "bf16": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> str:
    """Returns the file of the tiny llama's calibration."""
    path = tmp_path_factory.mktemp("calibration") / "tiny.json"
    measured(backend="native").save(path)
    return str(path)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[Path, str]:
    """Returns a tiny llama of widths that 4 bits can have, and its calibration."""
    path = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model("llama", **WIDTHS_OF_32["llama"], vocab_size=300).path, path)
    save_tiny_tokenizer(path)
    measured(model=str(path), backend="native").save(path / "calibration.json")
    return path, str(path / "calibration.json")


def measured(**options: Any) -> Calibration:
    usual = {"model": str(tiny_model_with_text()), "threads": 1}
    config = EngineConfig.from_options(**usual | options)
    return calibrate_model(config, TEXT, num_tokens=512, report=lambda line: None)


def sparse(path: str, **options: Any):
    """Makes an engine on native that leaves something out."""
    usual = {"backend": "native", "calibration": path}
    return make_llm(model_path=tiny_model_with_text(), **usual | options)


def results(llm, *, together: bool) -> list[Any]:
    if together:
        return [fingerprint(output) for output in llm.generate(PROMPTS, PARAMS)]
    return [alone(llm, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["both", "greedy"])
def test_a_row_alone_is_a_row_in_company(calibration, kind, precision):
    options = KINDS[kind] | PRECISIONS[precision]
    with sparse(calibration, **options) as llm:
        expected = results(llm, together=False)
        assert results(llm, together=True) == expected
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 7, "threads": 2},
        {"num_scheduler_steps": 1, "enable_prefix_caching": False},
        {"kv_cache": False},
        {"spec_method": "ngram"},
    ]
    for way in ways:
        with sparse(calibration, **options, **way) as llm:
            assert results(llm, together=True) == expected, way


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_by_columns_give_the_bits_of_tiles(wide, quantization, tmp_path):
    """Weights that are streamed lie in tiles, others by columns."""
    path, calibration = wide
    directory = tmp_path if get_file_system(tmp_path) not in ("tmpfs", "ramfs") else path.parent
    found = []
    for more in (
        {},
        {"threads": 3},
        {"weights_dir": str(directory), "weights_memory_bytes": 1 << 20},
    ):
        options = KINDS["both"] | {"quantization": quantization} | more
        with make_llm(model_path=path, backend="native", calibration=calibration, **options) as llm:
            found += [results(llm, together=together) for together in (False, True)]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_goes_on_as_it_would_have(calibration, mode):
    """The text of one request is the prompt of another, whose blocks are no part of the first."""
    options = KINDS["both"] | {"max_model_len": 80, "preemption_mode": mode}
    long = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = prompts_of(20, 25, 30, 33)
    with sparse(calibration, **options) as llm:
        expected = [alone(llm, prompt, long) for prompt in prompts]
        written = llm.generate(prompts[0], long)[0].outputs[0].token_ids
        llm.reset_prefix_cache()
        repeated = prompts[0] + written[:36]
        expected.append(alone(llm, repeated, GREEDY))
        block_bytes = (64 << 20) // (llm.info.kv_capacity_tokens // 16)
    with sparse(calibration, **options, kv_cache_memory_bytes=8 * block_bytes) as llm:
        llm.generate(repeated, GREEDY)
        outputs = llm.generate([*prompts, repeated], [*[long] * 4, GREEDY])
        assert llm.get_metrics().num_preemptions > 0
    assert [fingerprint(output) for output in outputs] == expected


def test_prompts_are_computed_whole(calibration):
    """Prompt logprobs and the first token are those of the engine that leaves nothing out; what
    comes behind is not.
    """
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    with make_llm(model_path=tiny_model_with_text(), backend="native") as llm:
        dense = llm.generate(PROMPTS, params)
    for kind in ("inputs", "gates"):
        with sparse(calibration, **KINDS[kind]) as llm:
            found = llm.generate(PROMPTS, params)
        for one, other in zip(found, dense, strict=True):
            assert one.prompt_logprobs == other.prompt_logprobs
            assert one.outputs[0].logprobs[0] == other.outputs[0].logprobs[0]
            assert one.outputs[0].logprobs[1] != other.outputs[0].logprobs[1]


def test_what_was_generated_is_not_found_again(calibration):
    params = msgspec.structs.replace(GREEDY, max_tokens=60)
    with sparse(calibration, **KINDS["both"]) as llm:
        (first,) = llm.generate(PROMPTS[1], params)
        following = [*PROMPTS[1], *first.outputs[0].token_ids, 7, 8, 9]
        (second,) = llm.generate(following, GREEDY)
        assert second.num_cached_tokens == len(PROMPTS[1]) // 16 * 16
        assert fingerprint(second) == alone(llm, following, GREEDY)
    with make_llm(model_path=tiny_model_with_text(), backend="native") as llm:
        llm.generate(following[:100], msgspec.structs.replace(GREEDY, max_tokens=1))
        (again,) = llm.generate(following, GREEDY)
        assert again.num_cached_tokens >= 96


def test_both_backends_measure_the_same():
    """The reference computes in float64: a number in a hundred may be in the next class."""
    found, expected = (measured(backend=name, dtype="float32") for name in ("native", "reference"))
    for kind in ("inputs", "gates"):
        pairs = list(zip(getattr(found, kind), getattr(expected, kind), strict=True))
        assert pairs
        for one, other in pairs:
            assert (one.weights, one.size) == (other.weights, other.size)
            assert one.thresholds == pytest.approx(other.thresholds, rel=0.02)
            assert one.losses == pytest.approx(other.losses, rel=0.02, abs=1e-4)


def test_curves_rise(calibration):
    """Thresholds and losses grow with the share, and lie between those of measured shares."""
    found = msgspec.json.decode(Path(calibration).read_bytes(), type=Calibration)
    for curve in found.inputs:
        for low, high in itertools.pairwise(curve.thresholds):
            assert 0 <= low <= high
        for low, high in itertools.pairwise(curve.losses):
            assert 0 <= low <= high <= 1
        assert curve.threshold(0.0) == 0
        assert curve.thresholds[4] <= curve.threshold(0.27) <= curve.thresholds[5]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too much": ({"activation_sparsity": 0.96}, "activation_sparsity: got 0.96, expected 0 to"),
    "less than nothing": ({"activation_sparsity": -0.1}, "expected a number of at least 0"),
    "no number": ({"ffn_sparsity": "gate:much"}, "ffn_sparsity: got 'gate:much', expected"),
    "no share": ({"ffn_sparsity": "gate:0"}, "ffn_sparsity: got 'gate:0', expected 'exact', or"),
    "unknown": ({"ffn_sparsity": "relu"}, "ffn_sparsity: got 'relu', expected 'exact', or"),
    "no calibration": (
        {"activation_sparsity": 0.2, "calibration": None},
        "activation_sparsity: requires a calibration\nhint: create one",
    ),
    "torch": (
        {"activation_sparsity": 0.2, "backend": "torch"},
        "requires the native or reference backend, got 'torch'",
    ),
    "ranks": (
        {"activation_sparsity": 0.2, "tensor_parallel_size": 2},
        "activation_sparsity: requires tensor_parallel_size 1, got 2",
    ),
    "calibration alone": ({}, "calibration: requires activation_sparsity or"),
    "no file": (
        {"activation_sparsity": 0.2, "calibration": "/nowhere/at/all"},
        "calibration: /nowhere/at/all: No such file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_go_together_are_refused(calibration, case):
    options, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        sparse(calibration, **options)
    assert message in str(caught.value)


def test_a_decoder_behind_an_encoder_is_refused(calibration):
    message = "is an encoder-decoder; sparsity requires a decoder-only model"
    with pytest.raises(ConfigError, match=message):
        make_llm("t5", backend="native", activation_sparsity=0.2, calibration=calibration)


DAMAGED = {
    "other weights": ({"fingerprint": "00"}, "it was made for other weights"),
    "another version": ({"version": 7}, "its version is 7, expected 1"),
    "no curves of one length": ({"inputs": "short"}, "is damaged"),
    "numbers that are none": ({"inputs": "nan"}, "is damaged"),
}


@pytest.mark.parametrize("case", [*DAMAGED, "no json"])
def test_damaged_calibrations_are_refused(calibration, case, tmp_path):
    path = tmp_path / "damaged.json"
    change, message = DAMAGED.get(case, ({}, "not a calibration file: "))
    data = msgspec.json.decode(Path(calibration).read_bytes())
    curve = data["inputs"][0]
    if change.get("inputs") == "short":
        curve["losses"].pop()
    elif change.get("inputs") == "nan":
        curve["thresholds"][3] = -1.0
    else:
        data |= change
    path.write_bytes(b"{" if case == "no json" else msgspec.json.encode(data))
    with pytest.raises(ConfigError) as caught:
        sparse(str(path), activation_sparsity=0.2)
    assert message in str(caught.value)
