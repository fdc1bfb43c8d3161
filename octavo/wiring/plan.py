"""What a model would take and give, found from its header alone: no weight is loaded, no engine
started. `octavo plan` prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.backends.base import Footprint
from octavo.checkpoint.catalogue import resolve_header
from octavo.checkpoint.open import open_header
from octavo.config.engine_config import EngineConfig
from octavo.models.hf_config import ModelInfo
from octavo.program.passes.gather_early import gather_early
from octavo.program.work import Work, work_of
from octavo.wiring.model import build_backend, derive_from, formats_of, part_of, program_of
from octavo.worker.capacity import Capacity, capacity_of


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Size, memory and arithmetic of a model under some options, for each rank."""

    config: EngineConfig
    info: ModelInfo
    num_parameters: int
    capacity: Capacity
    footprint: Footprint
    work: Work


def plan_model(config: EngineConfig, *, memory_bytes: int) -> ModelPlan:
    """Computes what a model would take of `memory_bytes`, and how much arithmetic a token is."""
    header = open_header(resolve_header(config.model.model))
    config, info = derive_from(config, header)
    whole = program_of(config, info, header)
    program = part_of(config, header, whole, 0)
    footprint = build_backend(config).footprint(program, formats_of(config, header, whole))
    return ModelPlan(
        config=config,
        info=info,
        num_parameters=sum(math.prod(weight.shape) for weight in whole.weights),
        capacity=capacity_of(config, footprint, memory_bytes),
        footprint=footprint,
        work=work_of(gather_early(program)),
    )
