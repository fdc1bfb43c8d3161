"""Runs a text through a model and measures its activations, for `octavo calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError, UnsupportedModel
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader
from octavo.config.engine_config import EngineConfig
from octavo.executor.base import ObservedInputs, Runnable
from octavo.executor.kv import KvCache
from octavo.program.ops import original_context
from octavo.program.program import Program, Weight
from octavo.quant.blocks import StoredWeight
from octavo.sparsity.activation_curves import VERSION, Calibration
from octavo.sparsity.activation_meter import ActivationMeter
from octavo.sparsity.neuron_predictors import SHARES, WANTED_SHARE
from octavo.sparsity.options import SparsityOptions
from octavo.sparsity.predictor_fit import PredictorFit
from octavo.sparsity.thresholds import weights_name
from octavo.utils.progress import Report
from octavo.wiring.backend import build_backend
from octavo.wiring.model import (
    Model,
    build_tokenizer,
    get_loaded_formats,
    open_model,
)
from octavo.worker.calibration import make_prompt_batch

WINDOW = 256
"""Number of tokens per window; each window is computed as a separate sequence."""


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """A loaded model, a text, and the meter that records its activations."""

    model: Model
    program: Program
    meter: ActivationMeter
    windows: Iterator[None]
    """Computes one window of WINDOW tokens per step, after which the meter can read it."""
    num_tokens: int
    observed: ObservedInputs
    floats: Callable[[Weight], NDArray[np.float32]]
    """Reads a weight as fp32, `[out, in]`."""


def calibrate_model(
    config: EngineConfig, text: str, *, num_tokens: int, report: Report, predictor_rank: int = 0
) -> Calibration:
    """Measures a model on the first `num_tokens` tokens of a text.

    With `predictor_rank`, also fits predictors of its gates on the first three quarters of the
    windows and evaluates them on the rest.
    """
    seen = measure_text(config, text, num_tokens=num_tokens, report=report)
    fit = _predictor_fit(seen, predictor_rank) if predictor_rank else None
    num_windows = seen.num_tokens // WINDOW
    num_fitted = num_windows - num_windows // 4
    for index, _ in enumerate(seen.windows):
        seen.meter.take(WINDOW)
        if fit is None:
            continue
        if index < num_fitted:
            fit.take(WINDOW)
        if index == num_fitted - 1:
            fit.solve()
        if index >= num_fitted:
            fit.evaluate(WINDOW)
    return Calibration(
        VERSION,
        weights_name(seen.model.checkpoint),
        seen.num_tokens,
        inputs=seen.meter.inputs(),
        gates=seen.meter.gates(),
        neurons=seen.meter.neurons(),
        predictors=[] if fit is None else fit.predictors(),
    )


def describe_recall(calibration: Calibration) -> list[str]:
    """Returns one sentence per fraction in SHARES about the recall of a calibration's
    predictors.
    """
    if not calibration.predictors:
        return []
    return [
        f"predictors that compute {share:.0%} of the neurons find"
        f" {np.mean([one.recall[SHARES.index(share)] for one in calibration.predictors]):.0%} of"
        f" the {WANTED_SHARE:.0%} that add most"
        for share in (0.2, 0.3, 0.5, 0.7)
    ]


def _predictor_fit(seen: MeasuredText, rank: int) -> PredictorFit:
    if seen.num_tokens < 4 * WINDOW:
        raise ConfigError(
            f"text: got {seen.num_tokens} tokens to fit predictors, expected at least {4 * WINDOW}",
            hint="use a longer text, for example of 16384 tokens",
        )
    return PredictorFit(seen.program, seen.observed.inputs, seen.floats, rank)


def measure_text(
    config: EngineConfig, text: str, *, num_tokens: int, report: Report
) -> MeasuredText:
    """Loads a model and prepares to run the first tokens of a text through it."""
    if config.model.load_format == "dummy":
        raise ConfigError(
            "load_format: got 'dummy'; calibration requires real weights",
            hint="remove load_format",
        )
    model = open_model(_measuring(config))
    program = model.program()
    if "logits" not in program.outputs:
        raise UnsupportedModel(
            f"{config.model.model} does not generate text; calibration requires a decoder",
            hint="name a decoder-only model",
        )
    if any(group.kind == "cross" for group in program.groups):
        raise UnsupportedModel(
            f"{config.model.model} is an encoder-decoder; calibration requires a decoder",
            hint="name a decoder-only model",
        )
    tokenizer = build_tokenizer(model)
    assert tokenizer is not None, "skip_tokenizer_init is not set"
    windows = _windows(tokenizer.encode(text, add_special_tokens=False), num_tokens)
    check_tensors(model.checkpoint, [program])
    backend = build_backend(model.config)
    backend.check(program, get_loaded_formats(model.config, model.checkpoint, program))
    if not backend.observes_inputs:
        raise ConfigError(
            f"backend: got {backend.name!r}, expected native or reference",
            hint="set backend to native",
        )
    options = model.config.model
    reader = WeightReader(model.checkpoint, options.dtype, options.quantization, program)
    runnable, observed = backend.prepare_observed_program(program, reader.load)
    meter = ActivationMeter(program, observed, _make_float_loader(reader.load))
    kv = backend.allocate(runnable.kv_layouts, [WINDOW // 16] * len(runnable.kv_layouts))

    def run() -> Iterator[None]:
        for index, window in enumerate(windows):
            report(f"window {index + 1} of {len(windows)}")
            _run(runnable, kv, program, window)
            yield

    return MeasuredText(
        model,
        program,
        meter,
        run(),
        num_tokens=WINDOW * len(windows),
        observed=observed,
        floats=_make_float_loader(reader.load),
    )


def _measuring(config: EngineConfig) -> EngineConfig:
    """Returns a config in which each step computes one window."""
    return replace(
        config.replace_options(SparsityOptions()),
        model=replace(config.model, max_model_len=WINDOW),
        scheduler=replace(config.scheduler, max_num_batched_tokens=WINDOW, max_num_seqs=1),
    )


def _windows(token_ids: list[int], num_tokens: int) -> list[NDArray[np.int32]]:
    count = min(len(token_ids), num_tokens) // WINDOW
    if count == 0:
        raise ConfigError(
            f"text: got {min(len(token_ids), num_tokens)} tokens to measure with, expected at"
            f" least {WINDOW}",
            hint="use a longer text, similar to the expected output",
        )
    whole = np.array(token_ids[: count * WINDOW], np.int32)
    return list(whole.reshape(count, WINDOW))


def _run(runnable: Runnable, kv: KvCache, program: Program, token_ids: NDArray[np.int32]) -> None:
    first = original_context(program).first_position(len(token_ids))
    batch = make_prompt_batch(token_ids, len(program.groups), num_axes=1, first_position=first)
    runnable.run(batch, kv)


def _make_float_loader(
    load: Callable[[Weight], StoredWeight],
) -> Callable[[Weight], NDArray[np.float32]]:
    def floats(weight: Weight) -> NDArray[np.float32]:
        return np.asarray(load(weight).dequantize(), np.float32)

    return floats


def read_text(path: Path) -> str:
    """Reads a UTF-8 text file; raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text: {path}: {error}", hint="use a file of UTF-8 text") from None
