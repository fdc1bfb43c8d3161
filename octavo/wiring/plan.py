"""Estimates a model's memory and arithmetic from its header, without loading weights (`octavo
plan`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from octavo.checkpoint.catalogue import resolve_header
from octavo.checkpoint.open import open_header
from octavo.config.engine_config import EngineConfig
from octavo.executor.base import Footprint
from octavo.models.hf_config import ModelInfo
from octavo.program.passes.gather_early import gather_early
from octavo.program.work import Work, count_work
from octavo.wiring.backend import backend_with, build_backend
from octavo.wiring.media.build import tower_programs, with_towers
from octavo.wiring.model import (
    build_model_programs,
    derive_from,
    get_loaded_formats,
    get_rank_program,
)
from octavo.wiring.model_files import with_mmproj
from octavo.wiring.model_hooks import model_hooks, transform, transform_part
from octavo.wiring.pooling_config import set_pooling
from octavo.wiring.speculation.draft import add_footprints
from octavo.worker.capacity import Capacity, get_capacity


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Size, memory and arithmetic of a model under given options, per rank."""

    config: EngineConfig
    info: ModelInfo
    num_parameters: int
    capacity: Capacity
    footprint: Footprint
    work: Work
    generates: bool = True
    """Whether the model generates text; an encoder pools it in one step."""


def plan_model(config: EngineConfig, *, memory_bytes: int) -> ModelPlan:
    """Estimates the memory use out of `memory_bytes`, and the arithmetic per token."""
    header = with_mmproj(config.model, open_header(resolve_header(config.model.model)))
    set_pooling(config.model, header)
    config, info = derive_from(config, header)
    for hooks in model_hooks():
        header = hooks.open_header(config, header)
    whole, *encoders = build_model_programs(info, header)
    whole = transform(config, header, whole)
    program = get_rank_program(config, header, whole, 0)
    backend = build_backend(config)
    program = transform_part(config, None, program)
    footprint = backend.footprint(program, get_loaded_formats(config, header, whole))
    for encoder in encoders:
        own = backend.footprint(encoder, get_loaded_formats(config, header, encoder))
        footprint = add_footprints(footprint, own, "encoder")
    footprint = with_towers(
        config, header, footprint, backend.options, partial(backend_with, config=config, ranks=None)
    )
    programs = (whole, *encoders, *tower_programs(header))
    weights = dict.fromkeys(weight for one in programs for weight in one.weights)
    return ModelPlan(
        config=config,
        info=info,
        num_parameters=sum(math.prod(each.shape) for each in weights if each.fill is None),
        capacity=get_capacity(config, footprint, memory_bytes),
        footprint=footprint,
        work=count_work(gather_early(program)),
        generates="pooled" not in program.outputs,
    )
