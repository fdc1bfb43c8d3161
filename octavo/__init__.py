"""Octavo: LLM inference and serving on a plain CPU. The public names, imported when they are first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.llm import LLM, AsyncLLM
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.llm",
    "SamplingParams": "octavo.sampling_params",
    "BeamSearchParams": "octavo.sampling_params",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
