"""Engines that draft with a Program of their own get the draft's blocks from the engine that
computes their prompts: the drafts are those of one engine, and so is every bit of the outputs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncLLM, SamplingParams
from octavo.worker.draft_model import DraftModel
from tests.support.llm_tools import final, fingerprint, make_llm, prompts_of
from tests.support.proposers import verified_at_any_cost
from tests.support.tiny_heads import TinyHead, tiny_assistant, tiny_eagle3, tiny_mtp
from tests.support.tiny_models import tiny_model
from tests.support.transfer_pairs import met, num_requests, pair

LIMIT_S = 120
FP32 = {"dtype": "float32"}
PROMPTS = prompts_of(120, 130, 200)
BASE = {"max_tokens": 32, "ignore_eos": True, "logprobs": 1}
PARAMS = [
    SamplingParams(temperature=0, **BASE),
    SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.5, **BASE),
    SamplingParams(temperature=0, **BASE),
]
HEADS = {
    "eagle3": tiny_eagle3,
    "deepseek_v3": lambda folder: tiny_mtp(folder, "deepseek_v3"),
    "qwen3_5_text": lambda folder: tiny_mtp(folder, "qwen3_5_text", copies=False),
    "gemma4_assistant": lambda folder: tiny_assistant(),
}


def outputs_of(
    path: Path, options: dict[str, Any], num_ranks: tuple[int, int] = (1, 1)
) -> tuple[list[Any], AsyncLLM]:
    """Computes the prompts on a pair of engines; returns fingerprints and the decode engine."""

    async def run() -> list[Any]:
        await met(prefill, decode)
        asked = asyncio.gather(*map(final, [decode] * len(PROMPTS), PROMPTS, PARAMS))
        outputs = await asyncio.wait_for(asked, LIMIT_S)
        assert all(output.num_cached_tokens >= 112 for output in outputs)
        await num_requests(decode)  # brings the stats up to date
        return [fingerprint(output) for output in outputs]

    model = ("native", "llama", FP32 | {"model": str(path)})
    with (
        verified_at_any_cost(),
        pair(model, num_ranks=num_ranks, spec_tokens=4, **options) as (prefill, decode),
    ):
        found = asyncio.run(run())
        stats = decode.stats()
        assert stats.connector.num_not_fetched == 0 and stats.connector.num_fetched > 0
        assert stats.num_used_blocks == 0
    return found, decode


def plain_outputs(path: Path) -> list[Any]:
    with make_llm(model_path=path, backend="native", **FP32) as llm:
        return [fingerprint(output) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "num_ranks",
    [(1, 1), (1, 2), pytest.param((2, 1), marks=pytest.mark.slow)],
    ids=lambda ranks: "-".join(map(str, ranks)),
)
def test_a_draft_model_finds_its_blocks(num_ranks):
    """The model is its own draft: it guesses every greedy token if its keys have arrived."""
    twin = tiny_model("llama").path
    options = {"spec_method": "draft_model", "spec_model": str(twin)}
    found, decode = outputs_of(twin, options, num_ranks)
    assert found == plain_outputs(twin)
    stats = decode.stats()
    assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens > 20


@pytest.mark.parametrize("name", HEADS)
def test_a_head_finds_features_and_keys(name, tmp_path, monkeypatch):
    """The first guesses behind a prompt that another engine has computed are the formula's."""
    head: TinyHead = HEADS[name](tmp_path)
    guesses: list[tuple[list[int], list[int]]] = []
    follow = DraftModel.follow

    def collect(self: Any, scheduled: Any, results: Any) -> None:
        follow(self, scheduled, results)
        for planned, result in zip(scheduled, results, strict=True):
            if planned.propose and result.draft_ids:
                known = planned.start + planned.num_tokens - len(planned.draft_ids)
                known += len(result.token_ids)
                row = self._rows.indices([planned])[0]
                tokens = self._rows.token_ids[row, :known].tolist()
                if tokens[:120] == PROMPTS[0]:
                    guesses.append((tokens, list(result.draft_ids)))

    monkeypatch.setattr(DraftModel, "follow", collect)
    found, _ = outputs_of(head.path, head.options)
    assert found == plain_outputs(head.path)
    assert len(guesses) > 2
    for tokens, guess in guesses[:3]:
        assert guess == head.guess(tokens, len(guess))
