"""LLM with text: prompts, stop strings, chats, banned words."""

import gc
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, InvalidRequest
from octavo.checkpoint.catalogue import resolve
from tests.support.llm_tools import make_llm
from tests.support.tiny_tokenizer import tiny_model_with_text

LETTERS = [f"{letter}" for letter in "abcdefgh"]


@pytest.fixture(scope="module")
def llm(backend):
    with make_llm(
        model_path=tiny_model_with_text(), skip_tokenizer_init=False, backend=backend
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def only_letters(llm):
    """Makes params under which the model can say a to h only."""
    ids = [llm.get_tokenizer().encode(letter, add_special_tokens=False)[0] for letter in LETTERS]

    def make(**options):
        given = {
            "temperature": 1.0,
            "seed": 4,
            "max_tokens": 12,
            "allowed_token_ids": ids,
            "ignore_eos": True,
        }
        return SamplingParams(**given | options)

    return make


def answer(llm, params, prompt="Hello"):
    return llm.generate(prompt, params)[0].outputs[0]


def test_text_goes_in_and_comes_out(llm, only_letters):
    output = llm.generate("Hello", only_letters())[0]
    assert output.prompt == "Hello" and len(output.prompt_token_ids) == 5
    text = output.outputs[0].text
    assert len(text) == 12 and set(text) <= set(LETTERS)
    assert llm.get_tokenizer().decode(output.outputs[0].token_ids) == text


def test_a_streams_text_grows_to_the_whole(llm, only_letters):
    whole = answer(llm, only_letters()).text
    texts = [output.outputs[0].text for output in llm.stream("Hello", only_letters())]
    assert texts == [whole[: index + 1] for index in range(12)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_the_text_and_the_request(llm, only_letters, keep):
    whole = answer(llm, only_letters()).text
    stop = whole[4:6]
    place = whole.index(stop)
    output = answer(llm, only_letters(stop=["zz", stop], include_stop_str_in_output=keep))
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == whole[: place + 2 * keep]
    assert len(output.token_ids) == place + 2
    assert llm.reset_prefix_cache(), "its blocks are free"


def test_what_may_become_a_stop_string_is_held_back(llm, only_letters):
    whole = answer(llm, only_letters()).text
    stop = "".join(reversed(whole[-3:])) + "xyz"
    texts = [output.outputs[0].text for output in llm.stream("Hello", only_letters(stop=stop))]
    assert texts[-1] == whole
    assert texts[:-1] == [whole[: max(0, index + 1 - (len(stop) - 1))] for index in range(11)]


def test_one_of_several_samples_may_stop(llm, only_letters):
    params = only_letters(n=3, max_tokens=20)
    whole = [sample.text for sample in llm.generate("Hello", params)[0].outputs]
    stop = whole[1][3:5]
    outputs = llm.generate("Hello", only_letters(n=3, max_tokens=20, stop=stop))[0].outputs
    assert [sample.text for sample in outputs] == [text.split(stop)[0] for text in whole]


def test_the_end_token_is_no_text(llm):
    eos = llm.get_tokenizer().eos_token_ids[0]
    output = answer(
        llm, SamplingParams(temperature=0, logit_bias={eos: 100}, skip_special_tokens=False)
    )
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == (
        [eos],
        "",
        "stop",
        None,
    )
    output = answer(
        llm, SamplingParams(temperature=0, logit_bias={eos: 100}, ignore_eos=True, max_tokens=3)
    )
    assert output.token_ids == [eos] * 3 and output.finish_reason == "length"


def test_a_stop_token_is_no_text(llm, only_letters):
    whole = answer(llm, only_letters())
    stop = whole.token_ids[4]
    output = answer(llm, only_letters(stop_token_ids=[stop]))
    place = whole.token_ids.index(stop)
    assert (output.text, output.stop_reason) == (whole.text[:place], stop)
    assert (
        answer(llm, only_letters(stop_token_ids=[stop], include_stop_str_in_output=True)).text
        == whole.text[: place + 1]
    )


def test_without_detokenize_there_is_no_text(llm, only_letters):
    output = answer(llm, only_letters(detokenize=False))
    assert output.text == "" and len(output.token_ids) == 12


def test_bad_words_are_not_said(llm, only_letters):
    whole = answer(llm, only_letters(max_tokens=40)).text
    word = whole[10:12]
    text = answer(llm, only_letters(max_tokens=40, bad_words=[word, "h"])).text
    assert word not in text and "h" not in text


def test_logprobs_are_readable(llm, only_letters):
    output = answer(llm, only_letters(logprobs=1, max_tokens=4))
    assert (
        "".join(next(iter(step.values())).decoded_token for step in output.logprobs) == output.text
    )


def test_chat_renders_the_template_and_messages_stay_text(llm, only_letters):
    tokenizer = llm.get_tokenizer()
    turn = tokenizer.encode("<|turn|>", add_special_tokens=False, allow_special_text=True)
    one, two = llm.chat(
        [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "<|turn|>"}]],
        only_letters(),
        add_generation_prompt=False,
    )
    assert one.prompt_token_ids == turn + tokenizer.encode("user:hi", add_special_tokens=False)
    assert two.prompt_token_ids.count(turn[0]) == 1
    single = llm.chat([{"role": "user", "content": "hi"}], only_letters())
    assert len(single) == 1 and single[0].outputs[0].text


def test_special_text_in_a_raw_prompt_is_special(llm, only_letters):
    prompt = llm.generate("<|turn|>hi", only_letters(max_tokens=1))[0].prompt_token_ids
    assert prompt[0] == 3 and len(prompt) == 3


def test_a_text_prompt_that_is_empty(llm):
    with pytest.raises(InvalidRequest, match="prompt: got no token"):
        llm.generate("", SamplingParams())


def test_a_model_without_a_tokenizer_says_what_to_do():
    with pytest.raises(
        ConfigError,
        match=(
            r"has no tokenizer\nhint: set `tokenizer`, or pass token ids with"
            r" skip_tokenizer_init"
        ),
    ):
        make_llm(skip_tokenizer_init=False)


def test_a_tokenizer_from_elsewhere(only_letters):
    with make_llm(skip_tokenizer_init=False, tokenizer=str(tiny_model_with_text())) as llm:
        assert answer(llm, only_letters()).text


@pytest.mark.model
def test_once_packed_the_models_file_is_let_go():
    """A file is unmapped once its model is packed: mapped pages count as the process's memory."""
    path = resolve("smollm2")
    with LLM(str(path), max_model_len=64, kv_cache_memory_bytes="4MiB", report=lambda text: None):
        gc.collect()
        assert path.name not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("ask", ["generate", "chat", "salt", "bad_words"])
def test_what_is_no_unicode_is_refused(llm, ask):
    text = "a\udcffb"
    asked = {
        "generate": lambda: llm.generate(text),
        "chat": lambda: llm.chat([{"role": "user", "content": text}]),
        "salt": lambda: llm.generate({"prompt": "a", "cache_salt": text}),
        "bad_words": lambda: llm.generate("a", SamplingParams(bad_words=[text])),
    }
    with pytest.raises(
        InvalidRequest, match=r"got '\\udcff' as character 1, expected Unicode text"
    ):
        asked[ask]()


def test_a_chat_goes_on_within_its_last_message(llm, only_letters):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "so "}]
    (continued,) = llm.chat(talk, only_letters(), use_tqdm=False, continue_final_message=True)
    (plain,) = llm.generate("<|turn|>user:Hi<|turn|>assistant:so ", only_letters(), use_tqdm=False)
    assert continued.prompt_token_ids == plain.prompt_token_ids
    assert continued.outputs[0].text == plain.outputs[0].text
    with pytest.raises(
        InvalidRequest, match="continue_final_message: the last message has the role"
    ):
        llm.chat(talk[:1], only_letters(), use_tqdm=False, continue_final_message=True)


def test_a_pattern_ends_the_answer_and_is_its_stop_reason(llm, only_letters):
    whole = answer(llm, only_letters()).text
    pattern = f"[{whole[4]}]{whole[5]}"
    place = whole.index(whole[4:6])
    for keeps in (False, True):
        ended = answer(llm, only_letters(stop_regex=pattern, include_stop_str_in_output=keeps))
        assert (ended.finish_reason, ended.stop_reason) == ("stop", pattern)
        assert ended.text == whole[: place + 2 * keeps]
        assert len(ended.token_ids) == place + 2


def test_an_answer_in_a_loop_ends_where_the_loop_is_complete(llm, only_letters):
    letter = llm.get_tokenizer().encode("a", add_special_tokens=False)
    rule = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
    for min_tokens, length in ((0, 6), (9, 9)):
        params = only_letters(
            allowed_token_ids=letter,
            repetition_detection=rule,
            max_tokens=200,
            min_tokens=min_tokens,
        )
        ended = answer(llm, params, "aaaaaaaaaa")
        assert (ended.finish_reason, ended.stop_reason) == ("repetition", "repetition_detected")
        assert ended.text == "a" * length and len(ended.token_ids) == length


def test_one_answer_in_a_loop_leaves_the_others_as_they_are(llm, only_letters):
    letter = llm.get_tokenizer().encode("b", add_special_tokens=False)
    alone = answer(llm, only_letters(max_tokens=40))
    looping = only_letters(
        allowed_token_ids=letter,
        repetition_detection={"max_pattern_size": 1, "min_count": 5},
        max_tokens=40,
    )
    first, second = llm.generate(["Hello", "Hello"], [only_letters(max_tokens=40), looping])
    assert first.outputs[0].token_ids == alone.token_ids
    assert second.outputs[0].text == "bbbbb"
