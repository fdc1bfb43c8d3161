"""Octavo: LLM inference and serving on a plain CPU and on NVIDIA GPUs.

Holds the public names, each imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from octavo.utils.version import __version__

if TYPE_CHECKING:
    from octavo.api.async_llm import AsyncLLM
    from octavo.api.beam_search_params import BeamSearchParams
    from octavo.api.llm import LLM
    from octavo.api.lora_request import LoRARequest
    from octavo.api.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.api.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from octavo.api.pooling_params import PoolingParams, TextPair
    from octavo.api.repetition_detection import RepetitionDetection
    from octavo.api.sampling_params import SamplingParams
    from octavo.api.structured_outputs import StructuredOutputs
    from octavo.api.transcription import VoiceActivity

_HOMES = {
    "LLM": "octavo.api.llm",
    "AsyncLLM": "octavo.api.async_llm",
    "LoRARequest": "octavo.api.lora_request",
    "PoolingParams": "octavo.api.pooling_params",
    "TextPair": "octavo.api.pooling_params",
    "VoiceActivity": "octavo.api.transcription",
    "ClassificationRequestOutput": "octavo.api.pooling_outputs",
    "EmbeddingRequestOutput": "octavo.api.pooling_outputs",
    "PoolingRequestOutput": "octavo.api.pooling_outputs",
    "ScoringRequestOutput": "octavo.api.pooling_outputs",
    "SamplingParams": "octavo.api.sampling_params",
    "BeamSearchParams": "octavo.api.beam_search_params",
    "RepetitionDetection": "octavo.api.repetition_detection",
    "StructuredOutputs": "octavo.api.structured_outputs",
    "RequestOutput": "octavo.api.outputs",
    "CompletionOutput": "octavo.api.outputs",
    "Logprob": "octavo.api.outputs",
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
    "PoolingRequestOutput",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "TextPair",
    "VoiceActivity",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
