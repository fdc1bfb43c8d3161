"""One response in progress: the same content, calls and finish reasons streamed or not."""

import asyncio

import pytest

from octavo.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.api.sampling_params import SamplingParams
from octavo.server.output_parser import PLAIN, OutputParser
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    ResponseOptions,
    TokenUsage,
)
from octavo.text.parsers.formats import named_reasoning_format, named_tool_format
from octavo.text.parsers.parts import MessageText
from octavo.text.parsers.reader import MessageForm

PIECES = [
    "<think>",
    "two ",
    "and two</think>",
    "Sum: ",
    '<tool_call>\n{"name": "add", "argu',
    'ments": {"a": 2}}\n</tool_call>',
]
PARSER = OutputParser(
    MessageForm(named_tool_format("hermes"), named_reasoning_format("qwen3"), {"add": {}})
)


class FakeStreams:
    """Outputs as an engine yields them; implements what a builder reads of a `OutputStreams`."""

    def __init__(self, *outputs: RequestOutput) -> None:
        self._outputs = outputs

    async def outputs(self):
        for output in self._outputs:
            yield 0, output

    async def results(self):
        return [self._outputs[-1]]


def output(text: str, finish_reason: str | None, num_tokens: int, index: int = 0) -> RequestOutput:
    ids = list(range(num_tokens))
    sample = CompletionOutput(index, text, ids, finish_reason=finish_reason, num_reasoning_tokens=1)
    metrics = RequestMetrics(num_generation_tokens=num_tokens)
    return RequestOutput(
        "r", None, [1, 2, 3], [sample], finish_reason is not None, None, 2, metrics
    )


def whole(finish_reason: str, **options) -> tuple[ResponseBuilder, ChoiceDelta]:
    streams = FakeStreams(output("".join(PIECES), finish_reason, len(PIECES)))
    response = ResponseBuilder(streams, SamplingParams(), PARSER, ResponseOptions(**options))
    (choice,) = asyncio.run(response.choices())
    return response, choice


def streamed(finish_reason: str, **options) -> tuple[ResponseBuilder, list[ChoiceDelta]]:
    ends = [None] * (len(PIECES) - 1) + [finish_reason]
    outputs = [output(*step, num) for num, step in enumerate(zip(PIECES, ends, strict=True), 1)]
    streams = FakeStreams(*outputs)
    response = ResponseBuilder(streams, SamplingParams(), PARSER, ResponseOptions(**options))

    async def deltas() -> list[ChoiceDelta]:
        return [delta async for (delta,) in response.deltas()]

    return response, asyncio.run(deltas())


def joined(deltas: list[ChoiceDelta]) -> MessageText:
    message = MessageText()
    for delta in deltas:
        message.add(delta.parts)
    return message


@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_a_stream_holds_the_whole_message(shows_reasoning):
    options = {"shows_reasoning": shows_reasoning, "new_call_id": lambda: "call_1"}
    (response, choice), (stream, deltas) = whole("stop", **options), streamed("stop", **options)
    assert joined(deltas) == choice.message
    assert choice.message.reasoning == ("two and two" if shows_reasoning else "")
    assert choice.message.content == "Sum:"
    (call,) = choice.message.calls
    assert (call.name, call.arguments, call.call_id) == ("add", '{"a": 2}', "call_1")
    assert stream.usage == response.usage == TokenUsage(3, 2, len(PIECES), 1)
    assert [delta.is_first for delta in deltas] == [True] + [False] * (len(deltas) - 1)


@pytest.mark.parametrize(
    ("given", "told"), [("stop", "tool_calls"), ("length", "length"), ("abort", "abort")]
)
def test_calls_change_the_finish_reason_of_a_stop_alone(given, told):
    assert whole(given)[1].finish_reason == told
    deltas = streamed(given)[1]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [told]
    assert deltas[-1].has_calls and not deltas[0].has_calls


def test_a_call_without_an_id_gets_one_of_the_length_that_the_template_checks():
    parser = OutputParser(PARSER.form, id_length=9)
    streams = FakeStreams(output("".join(PIECES), "stop", 1))
    (choice,) = asyncio.run(ResponseBuilder(streams, SamplingParams(), parser).choices())
    (call,) = choice.message.calls
    assert len(call.call_id) == 9 and call.call_id.isalnum()
    assert whole("stop")[1].message.calls[0].call_id.startswith("call_")


def test_tokens_without_text_are_sent_if_every_token_is_wanted():
    steps = [output("", None, 1), output("a", None, 2), output("", "stop", 2)]
    for every_token, expected in ((False, ["a", ""]), (True, ["", "a", ""])):
        response = ResponseBuilder(
            FakeStreams(*steps), SamplingParams(), PLAIN, ResponseOptions(every_token)
        )

        async def texts(response=response) -> list[str]:
            return [delta.text async for (delta,) in response.deltas()]

        assert asyncio.run(texts()) == expected


def test_samples_are_counted_over_all_prompts():
    class TwoPrompts(FakeStreams):
        async def results(self):
            return [output("a", "stop", 1), output("b", "length", 2, index=1)]

    response = ResponseBuilder(TwoPrompts(), SamplingParams(n=2))
    choices = asyncio.run(response.choices())
    assert [(one.index, one.text, one.finish_reason) for one in choices] == [
        (0, "a", "stop"),
        (3, "b", "length"),
    ]
    assert response.usage == TokenUsage(6, 4, 3, 2)
