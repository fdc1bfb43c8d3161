"""Estimates the memory of a family card's checkpoints as `octavo plan` does, without files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from octavo.checkpoint.family_cards import Bits, CardCheckpoint
from octavo.config.engine_config import EngineConfig
from octavo.wiring.plan import plan_model

KV_TOKENS = 8192
"""Number of tokens of the request whose KV cache size is shown."""
UNLIMITED = 1 << 60
"""Memory to plan for, in bytes."""
QUANTIZATION: dict[Bits, str | None] = {4: "int4", 8: "int8", 16: None}


@dataclass(frozen=True, slots=True)
class CheckpointMemory:
    """Size of a checkpoint and memory of one request."""

    num_parameters: int
    max_context_tokens: int
    weight_bytes: dict[Bits, int]
    """Bytes of the weights as packed by the native backend, by bits."""
    kv_bytes: int
    """KV cache and states of a request of KV_TOKENS tokens, or of the context if it is shorter; 0
    for an encoder."""


def estimate_memory(checkpoint: CardCheckpoint, bits: tuple[Bits, ...]) -> CheckpointMemory:
    """Plans a checkpoint at each precision; the result does not depend on the machine."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint.hf_config))
        plans = {
            num_bits: plan_model(
                EngineConfig.from_options(
                    model=folder,
                    quantization=QUANTIZATION[num_bits],
                    backend="native",
                    cpu_level="portable",
                ),
                memory_bytes=UNLIMITED,
            )
            for num_bits in bits
        }
    plan = plans[bits[0]]
    tokens = min(KV_TOKENS, plan.info.max_context_tokens)
    return CheckpointMemory(
        num_parameters=plan.num_parameters,
        max_context_tokens=plan.info.max_context_tokens,
        weight_bytes={num_bits: plan.capacity.weight_bytes for num_bits, plan in plans.items()},
        kv_bytes=plan.capacity.request_bytes(tokens) if plan.generates else 0,
    )
