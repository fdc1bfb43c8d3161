"""What engines are held to that remove work of generated tokens and of no prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo import LLM, RequestOutput, SamplingParams
from tests.support.llm_tools import GREEDY, fingerprint


def alone_and_together(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Any]:
    """Returns the results of each prompt alone, then of all."""
    indices = range(len(prompts))
    return [
        fingerprint(output)
        for some in (*([i] for i in indices), list(indices))
        for output in llm.generate([prompts[i] for i in some], [params[i] for i in some])
    ]


def whole_prompts(
    dense: Callable[[], LLM], sparse: Callable[[], LLM], prompts: Sequence[list[int]]
) -> list[tuple[RequestOutput, RequestOutput]]:
    """Checks that the sparse engine computes prompts as the dense one does, up to the first token,
    and finds K and V of prompts again but none of generated tokens. Returns what they answer, the
    sparse one first.
    """
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    with dense() as llm:
        wanted = llm.generate(prompts, params)
    with sparse() as llm:
        found = llm.generate(prompts, params)
        following = [*prompts[1], *found[1].outputs[0].token_ids, 7, 8, 9]
        (second,) = llm.generate(following, GREEDY)
    assert second.num_cached_tokens == len(prompts[1]) // 16 * 16
    for one, other in zip(found, wanted, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.outputs[0].logprobs[0] == other.outputs[0].logprobs[0]
    return list(zip(found, wanted, strict=True))
