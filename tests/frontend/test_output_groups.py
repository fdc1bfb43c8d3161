"""The grouping of a request's tokens into outputs never changes its final RequestOutput: stop
strings, logprobs and counts are those of one token at a time.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.api.outputs import RequestOutput, Timings
from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import TokenLogprobs
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.output_processor import OutputProcessor

TEXTS = [b"a", b"b", b"ab", b"c", "é".encode()[:1], "é".encode()[1:], b"", b"<end>"]
END = len(TEXTS) - 1
TIMINGS = Timings(0.0, 0.0, 0.0, 0.0, 1, 1.0, 1, waits={}, num_preemptions=2)


class Letters:
    """A vocabulary of a few letters, with as much of `prompt_ports.Tokenizer` as answers need."""

    special_token_ids = frozenset({END})

    def token_text(self, token_id: int) -> str:
        return TEXTS[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id]


def outputs_of(
    token_ids: list[int], sizes: list[int], params: SamplingParams
) -> list[EngineOutput]:
    """Makes a core's outputs for tokens in groups of `sizes`; what is left comes at the end."""
    found, start = [], 0
    for size in [*sizes, len(token_ids)]:
        group = token_ids[start : start + size]
        if group:
            entries = [
                TokenLogprobs([token], [-0.5 - start - i], [1]) for i, token in enumerate(group)
            ]
            timings = TIMINGS if params.stop_strings else None
            found.append(
                EngineOutput("a", group, entries if params.logprobs else None, timings=timings)
            )
        start += size
    found[-1].finish_reason = "stop" if token_ids[-1] == END else "length"
    found[-1].num_preemptions = TIMINGS.num_preemptions
    found[-1].timings = TIMINGS
    return found


def answer(outputs: list[EngineOutput], params: SamplingParams) -> tuple[RequestOutput, list[str]]:
    """Returns the final output and the core requests to abort. Every output comes at the same
    moment.
    """
    processor = OutputProcessor(Letters())  # type: ignore[arg-type]
    request = EngineRequest("a", [1], params, seed=1)
    processor.add(ParentRequest("a", None, [1], params, [request], 0.0))
    aborted = []
    for output in outputs:
        if processor.num_unfinished:
            aborted += processor.process([output], now=1.0).abort_ids
    assert processor.is_finished("a")
    return processor.output("a"), aborted


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, END - 1), min_size=1, max_size=12),
    ends=st.booleans(),
    sizes=st.lists(st.integers(1, 5), max_size=8),
    stop=st.sampled_from([None, ["b"], ["bc", "ca"], ["é"], ["aab", "ab"]]),
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
    logprobs=st.sampled_from([None, 1]),
)
@example(
    token_ids=[0, 1, 3], ends=False, sizes=[3], stop=["b"], include=False, min_tokens=0, logprobs=1
)
def test_grouping_changes_nothing(token_ids, ends, sizes, stop, include, min_tokens, logprobs):
    """One token at a time and any groups of tokens give equal final outputs."""
    token_ids = [*token_ids, END] if ends else token_ids
    params = SamplingParams(
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        logprobs=logprobs,
        max_tokens=100,
    )
    singly, _ = answer(outputs_of(token_ids, [1] * len(token_ids), params), params)
    grouped, aborted = answer(outputs_of(token_ids, sizes, params), params)
    assert grouped == singly
    sample = grouped.outputs[0]
    assert grouped.metrics.num_generation_tokens == len(sample.token_ids) <= len(token_ids)
    assert len(aborted) <= isinstance(sample.stop_reason, str)


def test_tokens_behind_a_stop_string_are_dropped():
    """An output of a, b and c with the stop string "b" gives two tokens and the text "a"."""
    params = SamplingParams(stop=["b"], logprobs=1, max_tokens=100)
    (whole,) = outputs_of([0, 1, 3], [3], params)
    output, aborted = answer(
        [EngineOutput("a", whole.token_ids, whole.logprobs, timings=TIMINGS)], params
    )
    sample = output.outputs[0]
    assert (sample.token_ids, sample.text, sample.stop_reason) == ([0, 1], "a", "b")
    assert sample.logprobs is not None and len(sample.logprobs) == 2
    assert sample.cumulative_logprob == -0.5 - 1.5
    assert output.metrics.num_generation_tokens == 2 and aborted == ["a"]
