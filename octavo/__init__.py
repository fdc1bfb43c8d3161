"""Octavo: LLM inference and serving on a plain CPU and on NVIDIA GPUs.

Holds the public names, each imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.pooling_outputs import EmbeddingRequestOutput
    from octavo.pooling_params import PoolingParams
    from octavo.repetition_detection import RepetitionDetection
    from octavo.sampling_params import BeamSearchParams, SamplingParams
    from octavo.structured_outputs import StructuredOutputs

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "PoolingParams": "octavo.pooling_params",
    "EmbeddingRequestOutput": "octavo.pooling_outputs",
    "SamplingParams": "octavo.sampling_params",
    "BeamSearchParams": "octavo.sampling_params",
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
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingParams",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
