"""A logits processor that lets a model write a given text, so that the logprobs of generated tokens
can be compared: `logits_processors=["forced_text:follow"]`, with this folder on Python's path.

A request's text is found by its prompt, which is the text's beginning.
"""

import numpy as np

from octavo import SamplingParams

TEXTS: dict[bytes, list[int]] = {}
"""Token ids of each text, by the first of them as bytes."""

KNOWN_BY = 32
"""Tokens that tell the texts apart."""


def learn(token_ids: list[int]) -> None:
    """Adds a text."""
    TEXTS[_name(np.array(token_ids))] = token_ids


def follow(token_ids, logits):
    """Leaves the text's next token alone to be drawn."""
    following = TEXTS[_name(token_ids)][len(token_ids)]
    forced = np.full_like(logits, -np.inf)
    forced[following] = 0
    return forced


def followed(llm, ids: list[int], num_prompt: int, *, logprobs: int):
    """Has an engine with this processor write a text behind its first `num_prompt` tokens; returns
    the RequestOutput, whose tokens have `logprobs` alternatives each. Ends the program with a
    sentence where the text was not written.
    """
    learn(ids)
    params = SamplingParams(
        temperature=0,
        max_tokens=len(ids) - num_prompt,
        ignore_eos=True,
        logprobs=logprobs,
        logits_processors=["follow"],
    )
    (found,) = llm.generate([{"prompt_token_ids": ids[:num_prompt]}], params)
    sample = found.outputs[0]
    if found.error or sample.token_ids != ids[num_prompt:] or sample.logprobs is None:
        raise SystemExit(f"a window was not followed: {found.error}")
    return found


def _name(token_ids) -> bytes:
    return token_ids[:KNOWN_BY].astype(np.int64).tobytes()
