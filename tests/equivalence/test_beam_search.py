"""Beam search: equal to transformers' (sequences and scores), and bitwise the same alone, in
company, in chunks and after preemptions.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import transformers

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.api.errors import InvalidRequest
from tests.equivalence.test_llm_equivalence import Setup
from tests.support.llm_tools import GREEDY, SAMPLED, make_llm, prompts_of
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

torch.set_num_threads(1)

STOPS = list(range(3, 40, 3))
"""Many, so that beams end at all lengths."""

SEARCH = SamplingParams(n=3, beam_width=4, max_tokens=30, stop_token_ids=STOPS[:2], logprobs=2)
SEARCHES = [
    SEARCH,
    msgspec.structs.replace(
        SEARCH, beam_width=3, length_penalty=2.0, min_tokens=10, stop_token_ids=STOPS
    ),
    msgspec.structs.replace(SEARCH, n=1, beam_width=2, early_stopping=True, logprobs=None),
    msgspec.structs.replace(SEARCH, n=5, beam_width=5, early_stopping="never", prompt_logprobs=1),
]


RULES = [
    (2, 1.0, False, 0),
    (4, 1.0, False, len(STOPS)),
    (4, 0.0, "never", len(STOPS)),
    (3, 2.0, "never", len(STOPS)),
    (2, 2.0, False, len(STOPS)),
    (4, -0.5, True, 2),
    (5, 1.0, True, len(STOPS)),
]
"""beam_width, length_penalty, early_stopping, stop tokens."""


def theirs(model: Any, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    """Returns what transformers finds: each sequence without the prompt, up to its end, and its
    score.
    """
    ends = {2, *(params.stop_token_ids or ())}
    made = model.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        found.append(
            (
                tokens[
                    : next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
                ],
                score,
            )
        )
    return found


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_it_finds_what_transformers_finds(backend: str, family: str) -> None:
    """Sequences equal those of transformers, with windows of 24 tokens in gemma3_text; scores do to
    float32's rounding.
    """
    tiny = tiny_model(family, **({"tie_word_embeddings": False} if family == "gemma3_text" else {}))
    prompts = prompts_of(20, 33)
    with make_llm(model_path=tiny.path, backend=backend, dtype="float32") as llm:
        for width, penalty, early, num_stops in RULES:
            params = SamplingParams(
                n=width,
                beam_width=width,
                length_penalty=penalty,
                early_stopping=early,
                max_tokens=12,
                min_tokens=3 if penalty == 2.0 else 0,
                stop_token_ids=STOPS[:num_stops],
            )
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                expected = theirs(tiny.model, prompt, params)
                assert [beam.token_ids for beam in output.outputs] == [
                    tokens for tokens, _ in expected
                ]
                assert [beam.score for beam in output.outputs] == pytest.approx(
                    [score for _, score in expected], abs=1e-4
                )


def searched(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Returns everything that a search gives, to be compared bitwise."""
    return [(output.outputs, output.prompt_logprobs) for output in llm.generate(prompts, params)]


SETUPS = [
    Setup("reference", "llama", "as packed"),
    Setup("native", "llama", "bf16"),
    Setup("native", "gemma3_text", "int8"),
]
PROMPTS = prompts_of(20, 33, 47, 5)


@pytest.fixture(
    scope="module",
    params=SETUPS,
    ids=lambda setup: f"{setup.backend}-{setup.model}-{setup.precision}",
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture(scope="module")
def whole(setup: Setup) -> list[Any]:
    """Returns the results of each search by itself."""
    found = []
    with setup.llm(max_model_len=96) as llm:
        for prompt, params in zip(PROMPTS, SEARCHES, strict=True):
            assert llm.reset_prefix_cache()
            found += searched(llm, [prompt], [params])
    return found


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"max_num_seqs": 5},
        {"batching": "none"},
        {"batching": "static"},
        {"scheduling_policy": "fair", "threads": 3},
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_company_changes_nothing(setup: Setup, whole: list[Any], options: dict[str, Any]) -> None:
    """A search among samples and greedy requests, in small chunks, with the prefix cache and
    without, finds what it finds alone.
    """
    with setup.llm(max_model_len=96, **options) as llm:
        others = [*prompts_of(40, 11)]
        for _ in range(2):
            found = searched(llm, [*PROMPTS, *others], [*SEARCHES, GREEDY, SAMPLED])
            assert found[: len(PROMPTS)] == whole
        assert llm.reset_prefix_cache(), "no block is held"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("mode", "caching", "budget"),
    [
        ("swap", True, 2048),
        ("swap", False, 21),
        ("recompute", True, 21),
        ("recompute", False, 2048),
    ],
)
def test_a_preempted_search_goes_on_as_it_would_have(
    setup: Setup, whole: list[Any], mode: str, caching: bool, budget: int
) -> None:
    options = {
        "max_model_len": 96,
        "enable_prefix_caching": caching,
        "preemption_mode": mode,
        "max_num_batched_tokens": budget,
    }
    with setup.llm_of_blocks(17, **options) as llm:
        outputs = llm.generate([*PROMPTS, *PROMPTS], SEARCHES * 2)
        stats = llm.get_metrics()
    assert [(output.outputs, output.prompt_logprobs) for output in outputs] == whole * 2
    assert stats.num_preemptions > 0 and stats.num_used_blocks == stats.num_host_blocks == 0
    assert (stats.num_swaps > 0) == (mode == "swap")
    assert sum(output.metrics.num_preemptions for output in outputs) == stats.num_preemptions


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_one_beam_is_greedy(backend: str) -> None:
    prompts = prompts_of(20, 7, 33)
    greedy = SamplingParams(temperature=0, max_tokens=25, stop_token_ids=STOPS, logprobs=3)
    with make_llm(backend=backend) as llm:
        plain = llm.generate(prompts, greedy)
        beams = llm.generate(prompts, msgspec.structs.replace(greedy, beam_width=1))
    for one, other in zip(plain, beams, strict=True):
        (a,), (b,) = one.outputs, other.outputs
        assert (a.token_ids, a.logprobs, a.finish_reason, a.stop_reason) == (
            b.token_ids,
            b.logprobs,
            b.finish_reason,
            b.stop_reason,
        )
        assert b.score == pytest.approx(a.cumulative_logprob / len(a.token_ids))


def test_logprobs_are_those_of_the_chosen_tokens() -> None:
    with make_llm() as llm:
        (output,) = llm.generate(prompts_of(20), SEARCH)
        for beam in output.outputs:
            forced = llm.generate(
                [*output.prompt_token_ids, *beam.token_ids],
                SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
            )
            own = forced[0].prompt_logprobs[len(output.prompt_token_ids) :]
            assert [
                {token: entry.logprob for token, entry in step.items()} for step in beam.logprobs
            ] == [{token: entry.logprob for token, entry in step.items()} for step in own]
            assert beam.cumulative_logprob == pytest.approx(
                sum(step[token].logprob for token, step in zip(beam.token_ids, own, strict=True))
            )


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("width", "penalty", "early"), [(3, 1.0, False), (4, 0.0, "never"), (2, 1.0, True)]
)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_stop_strings_end_beams_as_transformers_has_it(
    backend: str, width: int, penalty: float, early: Any
) -> None:
    """Stop strings end beams as in transformers; the strings are letters that the search likes to
    write.
    """
    path = tiny_model_with_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    params = BeamSearchParams(
        beam_width=width, max_tokens=20, length_penalty=penalty, early_stopping=early
    )
    with make_llm(
        model_path=path, skip_tokenizer_init=False, backend=backend, dtype="float32"
    ) as llm:
        prompts = ["Hello", "Beams of light"]
        plain = llm.beam_search(prompts, params)
        written = [
            piece
            for output in plain
            for token in output.outputs[0].token_ids
            if (piece := llm.get_tokenizer().token_bytes(token)).isascii()
        ]
        stops = sorted({piece.decode() for piece in written[::2] if piece.strip()})[:6]
        found = llm.beam_search(prompts, msgspec.structs.replace(params, stop=stops))
        kept = llm.beam_search(
            prompts, msgspec.structs.replace(params, stop=stops, include_stop_str_in_output=True)
        )
    ended = 0
    for prompt, output, whole in zip(prompts, found, kept, strict=True):
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        made = model.generate(
            ids,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping=early,
            max_new_tokens=20,
            eos_token_id=2,
            pad_token_id=0,
            stop_strings=stops,
            tokenizer=tokenizer,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [beam.score for beam in output.outputs] == pytest.approx(
            made.sequences_scores.tolist(), abs=1e-4
        )
        for beam, same, row in zip(
            output.outputs, whole.outputs, made.sequences.tolist(), strict=True
        ):
            assert (
                beam.token_ids
                == same.token_ids
                == row[len(ids[0]) : len(ids[0]) + len(beam.token_ids)]
            )
            if isinstance(beam.stop_reason, str):
                ended += 1
                assert same.text.endswith(beam.stop_reason) and beam.text == same.text.removesuffix(
                    beam.stop_reason
                )
                assert not any(stop in beam.text for stop in stops)
    assert ended


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width: got 0, expected None, or an integer from 1 to 1024"),
        ({"beam_width": 2, "n": 3}, "n: got 3, expected at most the beam_width"),
        (
            {"beam_width": 2, "temperature": 0.7},
            "temperature: got 0.7, expected 0.0 in a beam search",
        ),
        (
            {"beam_width": 2, "repetition_penalty": 1.2},
            "repetition_penalty: got 1.2, expected 1.0 in a beam search",
        ),
        (
            {"beam_width": 2, "early_stopping": "soon"},
            "early_stopping: got 'soon', expected True, False or 'never'",
        ),
        (
            {"beam_width": 2, "length_penalty": "x"},
            "length_penalty: got 'x', expected a number from -10 to 10",
        ),
        (
            {"beam_width": 2, "length_penalty": 400},
            "length_penalty: got 400, expected a number from -10 to 10",
        ),
        (
            {"beam_width": 2, "length_penalty": -400.0},
            "length_penalty: got -400.0, expected a number from -10 to 10",
        ),
    ],
)
def test_what_a_search_cannot_honour_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)


def test_what_can_never_fit_is_refused_by_name() -> None:
    params = SamplingParams(beam_width=9)
    with (
        make_llm() as llm,
        pytest.raises(
            InvalidRequest,
            match=r"beam_width: got 9, expected at most 8 sequences at once \(max_num_seqs\)",
        ),
    ):
        llm.generate([[5]], params)
    alone = {"kv_layout": "virtual", "enable_prefix_caching": False}
    with (
        make_llm(backend="native", **alone) as llm,
        pytest.raises(InvalidRequest, match="beam search requires shared KV blocks"),
    ):
        llm.generate([[5]], msgspec.structs.replace(params, beam_width=2))
    small = Setup("native", "llama", "fp32").llm_of_blocks(8, max_model_len=128)
    with (
        small as llm,
        pytest.raises(InvalidRequest, match="too few for these beams after a prompt of 100"),
    ):
        llm.generate(prompts_of(100), msgspec.structs.replace(params, beam_width=4))
