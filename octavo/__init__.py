"""Octavo: LLM inference and serving on a plain CPU and on NVIDIA GPUs.

Holds the public names, each imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.beam_search_params import BeamSearchParams
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        ScoringRequestOutput,
    )
    from octavo.pooling_params import PoolingParams, TextPair
    from octavo.repetition_detection import RepetitionDetection
    from octavo.sampling_params import SamplingParams
    from octavo.structured_outputs import StructuredOutputs

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "LoRARequest": "octavo.lora_request",
    "PoolingParams": "octavo.pooling_params",
    "TextPair": "octavo.pooling_params",
    "ClassificationRequestOutput": "octavo.pooling_outputs",
    "EmbeddingRequestOutput": "octavo.pooling_outputs",
    "ScoringRequestOutput": "octavo.pooling_outputs",
    "SamplingParams": "octavo.sampling_params",
    "BeamSearchParams": "octavo.beam_search_params",
    "RepetitionDetection": "octavo.repetition_detection",
    "StructuredOutputs": "octavo.structured_outputs",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "TextPair",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
