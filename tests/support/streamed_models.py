"""Engines of tiny models whose weights are streamed from a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from tests.support.llm_tools import fingerprint, make_llm
from tests.support.tiny_models import tiny_model


def streamed(directory: Path, memory: int, family: str = "llama", **options: Any) -> LLM:
    return make_llm(
        **{"model_path": tiny_model(family).path} | options,
        backend="native",
        weights_dir=str(directory),
        weights_memory_bytes=memory,
    )


def least_bytes(
    directory: Path,
    family: str = "llama",
    message: str = r"two layers .*weights that always stay in memory",
    **options: Any,
) -> int:
    """Returns the least memory with which a family runs, as the rejection of 1 byte says, whose
    text has `message`.
    """
    with pytest.raises(ConfigError, match=message) as caught:
        streamed(directory, 1, family, **options)
    found = re.search(r"set weights_memory_bytes to (\d+) or more", str(caught.value))
    assert found is not None
    return int(found[1])


def results(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Any]:
    """Returns the results of each prompt alone, then of all in one batch."""
    alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    return [fingerprint(output) for output in (*alone, *llm.generate(prompts, params))]
