"""Guessed tokens never change an answer of a form that is completed before its length ends. Rows
with logits processors are not guessed for.
"""

from __future__ import annotations

import random

import pytest

from octavo import SamplingParams, StructuredOutputs
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.proposers import DraftTreeBuilder, all_verified, draft_counts, right, sequences
from tests.support.tiny_tokenizer import tiny_model_with_text

FORM = StructuredOutputs(
    json={"type": "array", "items": {"type": ["string", "number"]}, "minItems": 6}
)
NAMES = ["favours_last", "only_even"]
MODES = {
    "sampled": {},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.8},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 3.0},
    "processors": {"logits_processors": NAMES[:1]},
}
PROMPTS = prompts_of(9, 14)


def careless(answers: list[list[int]]) -> DraftTreeBuilder:
    """Guesses what comes, now and then with a token that may be wrong or illegal."""
    dice, knows = random.Random(4), right(answers)

    def guess(token_ids: list[int], most: int) -> list[int]:
        return [dice.randrange(280) if dice.random() < 0.1 else i for i in knows(token_ids, most)]

    return guess


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("told", [{}, {"logprobs": 1}], ids=["plain", "logprobs"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_guesses_change_no_bit_of_a_checked_answer(backend, mode, told):
    options = {
        "model_path": tiny_model_with_text(),
        "backend": backend,
        "skip_tokenizer_init": False,
        "structured_close": True,
        "logits_processors": [f"tests.support.processors:{name}" for name in NAMES],
    }
    asked = {"structured_outputs": FORM, **MODES[mode], **told}
    params = SamplingParams(max_tokens=64, seed=7, **asked)
    with make_llm(**options) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = careless(sequences(plain, PROMPTS))
    with all_verified(guess), make_llm(**options, spec_method="ngram") as llm:
        found = llm.generate(PROMPTS, params)
        num_drafted, num_accepted = draft_counts(llm)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert (0 < num_accepted <= num_drafted) is (mode != "processors")
    assert all(output.outputs[0].finish_reason == "stop" for output in found)
