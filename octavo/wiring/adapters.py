"""Builds the worker's LoRA adapter store and the frontend's validation of adapter files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.config.engine_config import EngineConfig
from octavo.executor.base import Runnable
from octavo.frontend.adapter_names import AdapterNames
from octavo.program.passes.adapters import with_sites
from octavo.program.program import Program, Weight
from octavo.quant.blocks import StoredWeight
from octavo.worker.lora.adapter_reader import AdapterReader
from octavo.worker.lora.adapter_store import AdapterStore


def with_adapter_sites(config: EngineConfig, program: Program, whole: Program) -> Program:
    """Adds adapter sites to a rank's Program if LoRA is enabled."""
    if not config.lora.enable_lora:
        return program
    if "pooled" in program.outputs:
        raise ConfigError(
            f"enable_lora: {config.model.model} is a pooling model; adapters require a generation"
            " model",
            hint="remove enable_lora",
        )
    return with_sites(program, whole)


def adapter_store(
    config: EngineConfig,
    programs: tuple[Program, Program],
    runnables: Mapping[str, Runnable],
    load: Callable[[Weight], StoredWeight],
) -> AdapterStore | None:
    """Builds the adapter store of a rank; None if LoRA is disabled. `programs` are the rank's
    Program and the unsharded Program.
    """
    program, whole = programs
    lora = config.lora
    if not lora.enable_lora:
        return None
    slots = [runnable.adapters for runnable in runnables.values()]

    def dequantize(weight: Weight) -> NDArray[np.float32]:
        return load(weight).dequantize()

    reader = AdapterReader(
        program,
        dequantize,
        max_rank=lora.max_lora_rank,
        dtype=lora.lora_dtype,
        whole=with_sites(whole),
    )
    return AdapterStore(reader.read, slots, lora.max_cpu_loras or lora.max_loras)


def adapter_names(config: EngineConfig, program: Program, model: Path) -> AdapterNames | None:
    """Builds the validator of requests' adapters; None if LoRA is disabled."""
    if not config.lora.enable_lora:
        return None

    def dequantize(weight: Weight) -> NDArray[np.float32]:
        # Keeps no reference to the checkpoint, whose file would stay mapped.
        return WeightReader(open_checkpoint(model)).load(weight).dequantize()

    reader = AdapterReader(
        with_sites(program),
        dequantize,
        max_rank=config.lora.max_lora_rank,
        dtype=config.lora.lora_dtype,
    )
    return AdapterNames(lambda path: reader.read(path).digest)
