"""The n best of best_of samples are the most likely by cumulative logprob, best first, each as it
would be among n = best_of.
"""

from __future__ import annotations

import msgspec
import pytest

from octavo import SamplingParams
from octavo.api.errors import InvalidRequest
from tests.support.llm_tools import make_llm, prompts_of

MANY = SamplingParams(n=6, temperature=1.3, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
CHOSEN = msgspec.structs.replace(MANY, n=2, best_of=6)


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_the_best_are_the_most_likely_of_all(backend: str) -> None:
    with make_llm(backend=backend) as llm:
        prompts = prompts_of(20, 7)
        for every, chosen in zip(
            llm.generate(prompts, MANY), llm.generate(prompts, CHOSEN), strict=True
        ):
            ranked = sorted(every.outputs, key=lambda sample: -(sample.cumulative_logprob or 0.0))
            assert [sample.index for sample in chosen.outputs] == [0, 1]
            for best, sample in zip(ranked, chosen.outputs, strict=False):
                assert (sample.token_ids, sample.logprobs, sample.cumulative_logprob) == (
                    best.token_ids,
                    best.logprobs,
                    best.cumulative_logprob,
                )
            assert chosen.metrics is not None and chosen.metrics.num_generation_tokens == 6 * 12


def test_without_logprobs_the_same_are_chosen() -> None:
    with make_llm() as llm:
        prompt = prompts_of(20)[0]
        wanted, plain = llm.generate(
            [prompt, prompt], [CHOSEN, msgspec.structs.replace(CHOSEN, logprobs=None)]
        )
    assert [sample.token_ids for sample in plain.outputs] == [
        sample.token_ids for sample in wanted.outputs
    ]
    assert all(
        sample.logprobs is None and sample.cumulative_logprob is not None
        for sample in plain.outputs
    )


def test_a_stream_has_nothing_to_show_before_the_end() -> None:
    with make_llm() as llm:
        outputs = list(llm.stream(prompts_of(9)[0], CHOSEN))
    assert len(outputs) == 1 and outputs[0].finished and len(outputs[0].outputs) == 2


def test_best_of_is_checked() -> None:
    with pytest.raises(
        InvalidRequest, match=r"best_of: got 2, expected None, or an integer from n \(3\)"
    ):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(
        InvalidRequest, match="best_of: got 2, expected 1 when the temperature is 0"
    ):
        SamplingParams(best_of=2, temperature=0)
    assert SamplingParams(n=2, best_of=2).is_ranked is False
