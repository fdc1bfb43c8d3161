"""Where reasoning ends: stop strings count behind it, and its tokens are counted."""

import pytest

from octavo.api.sampling_params import SamplingParams
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.text.answer_marks import AnswerMarks
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import load_tokenizer
from tests.support.tiny_tokenizer import SPECIALS, save_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    source = tokenizer_source(folder, {}, {})
    assert source is not None
    return load_tokenizer(source)


def params(*, is_open: bool = False, stop: str = "STOP", shown: list[int] | None = None):
    marks = AnswerMarks(
        shown_token_ids=shown or [],
        reasoning_opening="<think>",
        reasoning_closing="</think>",
        begins_in_reasoning=is_open,
    )
    return SamplingParams(stop=[stop], answer_marks=marks)


@pytest.mark.parametrize(
    ("text", "is_open", "shown", "num_thought"),
    [
        ("<think>a STOP b</think>c STOP d", False, "<think>a STOP b</think>c ", 23),
        ("\n<think>STOP</think>STOP", False, "\n<think>STOP</think>", 20),
        ("a STOP b</think>c STOP d", True, "a STOP b</think>c ", 16),
        ("a STOP <think>b", False, "a ", 0),
        ("STOP", False, "", 0),
        ("<thinSTOP", False, "<thin", 0),
        ("<think>never STOP ended", False, "<think>never STOP ended", 23),
        ("</thinkSTOP</think>STOP", True, "</thinkSTOP</think>", 19),
    ],
)
def test_a_stop_string_counts_outside_of_the_reasoning(
    tokenizer, text, is_open, shown, num_thought
):
    detokenizer = Detokenizer(tokenizer, params(is_open=is_open))
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if detokenizer.push([token_id]) is not None:
            break
    assert detokenizer.text() == shown
    assert detokenizer.num_reasoning_tokens == num_thought


def test_a_special_token_that_is_a_mark_is_shown_and_others_are_not(tokenizer):
    turn, pad = SPECIALS.index("<|turn|>"), SPECIALS.index("<pad>")
    detokenizer = Detokenizer(tokenizer, params(shown=[turn]))
    detokenizer.push([turn, pad, *tokenizer.encode("a", add_special_tokens=False)])
    assert detokenizer.text() == "<|turn|>a"
