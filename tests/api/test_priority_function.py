"""A user's function computes the priority of each request under the policy priority."""

import pytest

from octavo.api.errors import ConfigError, ServerError
from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.frontend.input_processor import RequestContext
from tests.support.llm_tools import GREEDY, make_llm, prompts_of

MODULE = "tests.support.priorities"


def options(function: str) -> dict:
    return {"scheduling_policy": "priority", "priority_function": f"{MODULE}:{function}"}


def started_order(function: str, prompts: list[list[int]], priority: list[int]) -> list[int]:
    """Returns the indices of requests in the order in which they start, one at a time."""
    with make_llm(max_num_seqs=1, **options(function)) as llm:
        outputs = llm.generate(prompts, GREEDY, priority=priority)
    return sorted(range(len(prompts)), key=lambda index: outputs[index].metrics.scheduled_ts)


def test_the_shortest_prompt_starts_first():
    assert started_order("shortest_prompt", prompts_of(40, 8, 25, 12), [0] * 4) == [1, 3, 2, 0]


def test_the_function_sees_the_requests_own_priority():
    assert started_order("own_reversed", prompts_of(8, 9, 10, 11), [0, 3, 1, 2]) == [1, 3, 2, 0]


def test_background_requests_keep_their_priority():
    with make_llm(**options("shortest_prompt")) as llm:
        (prompt,) = prompts_of(9)
        request, background = (
            llm.frontend.prepare_request("name", prompt, GREEDY, RequestContext(priority))
            for priority in (0, BACKGROUND_PRIORITY)
        )
    assert request.origin.priority == request.samples[0].priority == 9
    assert background.origin.priority == background.samples[0].priority == BACKGROUND_PRIORITY


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("raises", "raises raised ValueError: it does not like 9 tokens"),
        ("returns_text", "returned 'high', expected a 32-bit integer"),
        ("returns_large", "returned 2147483648, expected a 32-bit integer"),
    ],
)
def test_a_request_fails_if_the_function_does(function, text):
    with make_llm(**options(function)) as llm, pytest.raises(ServerError, match=text):
        llm.generate(prompts_of(9), GREEDY)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"priority_function": "priorities"}, "got 'priorities', expected MODULE:FUNCTION"),
        (
            {"priority_function": f"{MODULE}:raises", "scheduling_policy": "fcfs"},
            "priority_function: not allowed with scheduling_policy 'fcfs'",
        ),
        (
            {"priority_function": f"{MODULE}:nothing"},
            "priorities:nothing cannot be imported: AttributeError",
        ),
        (
            {"priority_function": f"{MODULE}:__name__"},
            "is 'tests.support.priorities', expected a function",
        ),
    ],
)
def test_an_invalid_option_is_rejected(given, text):
    with pytest.raises(ConfigError, match=text):
        make_llm(**{"scheduling_policy": "priority"} | given)
