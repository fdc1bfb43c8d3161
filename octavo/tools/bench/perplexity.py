"""Perplexity of a model over a text, split into independent windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from octavo.api.errors import ConfigError, WorkerFailed

if TYPE_CHECKING:
    from octavo.api.llm import LLM


def perplexity(llm: LLM, text: str, window: int, num_windows: int | None = None) -> float:
    """Returns exp of the mean negative logprob of all tokens except the first of each window.

    Each window is preceded by the tokenizer's initial special tokens.
    """
    from octavo.api.sampling_params import SamplingParams

    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    first = tokenizer.encode("")
    windows = [
        token_ids[start : start + window] for start in range(0, len(token_ids) - window + 1, window)
    ][:num_windows]
    if not windows:
        raise ConfigError(
            f"text: got {len(token_ids)} tokens, expected at least one window of {window}",
            hint="use a longer text, or a smaller window",
        )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": first + ids} for ids in windows], params):
        if output.error or output.prompt_logprobs is None:
            raise WorkerFailed(f"a window failed: {output.error}")
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
        for token_id, logprobs in pairs[len(first) + 1 :]:
            assert logprobs is not None
            total -= logprobs[token_id].logprob
            count += 1
    return math.exp(total / count)
