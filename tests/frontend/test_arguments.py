"""What users pass in: one or several, as lists, arrays and generators; mistakes are named."""

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.api.errors import InvalidRequest
from octavo.frontend.arguments import (
    conversation_list,
    params_for_each,
    priority_for_each,
    prompt_list,
)

HI = [{"role": "user", "content": "hi"}]


def test_one_prompt_or_several():
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list(["a", [1]]) == ["a", [1]]
    assert prompt_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert prompt_list([]) == []


def test_arrays_and_generators_are_taken():
    assert prompt_list(np.array([1, 2])) == [[1, 2]]
    assert prompt_list(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert prompt_list([np.int64(1), np.int64(2)]) == [[1, 2]]
    assert prompt_list(text for text in "ab") == ["a", "b"]
    assert prompt_list(range(3)) == [[0, 1, 2]]
    params = [SamplingParams(), SamplingParams()]
    assert params_for_each(iter(params), 2) == params
    assert priority_for_each(np.array([1, 2]), 2) == [1, 2]
    assert conversation_list(iter([HI, HI])) == [HI, HI]


def test_one_conversation_or_several():
    assert conversation_list(HI) == [HI]
    assert conversation_list([HI, HI]) == [HI, HI]
    assert conversation_list([]) == []
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert conversation_list(calls) == [calls]


@pytest.mark.parametrize("prompts", [5, 5.0, None, {1, 2}, b"ab", np.int64(5)])
def test_what_is_no_prompt_is_refused(prompts):
    with pytest.raises(InvalidRequest, match=r"prompts: got .*, expected a string, token ids"):
        prompt_list(prompts)


@pytest.mark.parametrize(
    ("messages", "message", "hint"),
    [
        ("hi", "messages: got 'hi'", "did you mean [{'role': 'user', 'content': 'hi'}]?"),
        (HI[0], "messages: got {'role'", "did you mean [{'role': 'user', 'content': 'hi'}]?"),
        (5, "messages: got 5, expected a list of messages", "did you mean [{'role'"),
        (["hi"], "messages[0]: got 'hi'", "did you mean {'role': 'user', 'content': 'hi'}?"),
        ([*HI, {"role": "user"}], "messages[1]: got {'role': 'user'}, which has no 'content'", ""),
        ([{"content": "hi"}], "messages[0]: got {'content': 'hi'}, which has no 'role'", ""),
        ([{"role": 5, "content": "hi"}], "messages[0].role: got 5, expected a string", ""),
        ([HI, "hi"], "messages: got 'hi'", "did you mean"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, message, hint):
    with pytest.raises(InvalidRequest) as error:
        conversation_list(messages)
    assert message in error.value.message and hint in (error.value.hint or "")
    assert error.value.param == "messages"


def test_what_are_no_params_is_refused():
    with pytest.raises(InvalidRequest) as error:
        params_for_each({"max_tokens": 2}, 1)
    assert error.value.message == (
        "sampling_params: got the dict {'max_tokens': 2}, expected SamplingParams"
    )
    assert error.value.hint == "did you mean SamplingParams(max_tokens=2)?"
    for wrong in (5, [SamplingParams(), 5], "greedy"):
        with pytest.raises(InvalidRequest, match=r"sampling_params: got .*, expected Sampling"):
            params_for_each(wrong, 2)
    with pytest.raises(InvalidRequest, match="sampling_params: got 1, expected one, or one"):
        params_for_each([SamplingParams()], 2)
