"""POST /v1/completions, through OpenAI's own client where it knows the field."""

import json

import pytest

from tests.support.backend_choice import chosen_backend
from tests.support.live_server import LETTERS, READABLE, events_of, ids_of


def complete(client, prompt="Hello", **options):
    return client.completions.create(model="tiny", prompt=prompt, **READABLE | options)


def streamed(client, **options):
    """Returns the texts by choice, the finish reasons by choice, and the chunks."""
    chunks = list(complete(client, stream=True, **options))
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_a_text(client):
    answer = complete(client)
    assert (
        answer.id.startswith("cmpl-")
        and answer.object == "text_completion"
        and answer.model == "tiny"
    )
    (choice,) = answer.choices
    assert len(choice.text) == 24 and set(choice.text) <= set("abcdefgh")
    assert choice.finish_reason == "length" and choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 24, 29)


def test_the_model_may_be_left_out_and_max_tokens_is_16(http):
    answer = http.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True}).json()
    assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] == 16


def test_token_ids_are_the_same_prompt(client):
    assert complete(client, ids_of("Hello")).choices[0].text == complete(client).choices[0].text


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_are_answered_in_order(client, as_ids):
    prompts = ["Hello", "A longer one", "x"]
    given = [ids_of(prompt) for prompt in prompts] if as_ids else prompts
    answer = complete(client, given, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    for index, prompt in enumerate(prompts):
        alone = complete(client, prompt, n=2)
        assert [choice.text for choice in answer.choices[2 * index : 2 * index + 2]] == [
            choice.text for choice in alone.choices
        ]
    assert answer.usage.prompt_tokens == 18 and answer.usage.completion_tokens == 6 * 24


ROUNDING = 1e-5 if chosen_backend("native") == "torch" else 0
"""Tolerance of logprobs: none, but on torch, which serves these tests without batch_invariant."""


def tokens_lie_in(text, logprobs):
    """Checks that every shown token is in the text at its offset; returns how many there are."""
    offsets = [*logprobs.text_offset, len(text)]
    assert offsets == sorted(offsets)
    shown = [
        (token, begin, end)
        for token, begin, end in zip(logprobs.tokens, offsets, offsets[1:], strict=False)
        if begin < end and not token.startswith("bytes:")
    ]
    for token, begin, end in shown:
        assert text[begin:end] in (token, token.lstrip())
    return len(shown)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "prompt", ["<|turn|>Hello", "Hello<|turn|>", "<bos><|turn|>Hi", ids_of("<|turn|>Hello")]
)
def test_offsets_are_places_in_the_text_where_special_tokens_are_echoed(client, prompt, skip):
    fields = {"echo": True, "logprobs": 0, "max_tokens": 12}
    extra = {"extra_body": {"skip_special_tokens": skip, "allowed_token_ids": [3, 70, 71]}}
    choice = client.completions.create(model="tiny", prompt=prompt, **fields, **extra).choices[0]
    assert tokens_lie_in(choice.text, choice.logprobs) >= 6
    first = len(choice.logprobs.tokens) - 12
    if isinstance(prompt, str):
        assert choice.text.startswith(prompt)
        assert choice.logprobs.text_offset[first] == len(prompt)


def test_a_byte_order_mark_before_the_body_is_skipped(http):
    body = json.dumps({"model": "tiny", "prompt": "Hello", "seed": 3}).encode("utf-8-sig")
    answer = http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    twice = http.post(
        "/v1/completions",
        content=b"\xef\xbb\xbf" + body,
        headers={"Content-Type": "application/json"},
    )
    assert twice.status_code == 400


def test_a_stop_string_may_spell_a_special_token(http):
    """The tokens alternate between the letter a and a special token."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 40, "temperature": 2}
    body |= {"allowed_token_ids": [3, *ids_of("a")], "seed": 1, "ignore_eos": True}
    plain = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    token_ids = plain["choices"][0]["token_ids"]
    assert 3 in token_ids and set(plain["choices"][0]["text"]) == {"a"}
    for kept in (False, True):
        asked = body | {"stop": ["<|turn|>"], "include_stop_str_in_output": kept}
        choice = http.post("/v1/completions", json=asked).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|turn|>")
        assert choice["text"] == "a" * token_ids.index(3) + "<|turn|>" * kept


def test_a_stream_says_what_the_whole_answer_says(client):
    prompts = ["Hello", "A longer one", "x"]
    whole = complete(client, prompts, n=2, logprobs=2)
    texts, reasons, chunks = streamed(client, prompt=prompts, n=2, logprobs=2)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert set(reasons.values()) == {"length"}
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        parts = [
            part.logprobs
            for chunk in chunks
            for part in chunk.choices
            if part.index == choice.index and part.logprobs
        ]
        assert [value for part in parts for value in part.token_logprobs] == pytest.approx(
            choice.logprobs.token_logprobs, abs=ROUNDING
        )
        assert [
            value for part in parts for value in part.text_offset
        ] == choice.logprobs.text_offset
        assert tokens_lie_in(choice.text, choice.logprobs) >= 1
        tops = [value for part in parts for value in part.top_logprobs]
        assert tops == [pytest.approx(top, abs=ROUNDING) for top in choice.logprobs.top_logprobs]


def test_usage_at_the_end_of_a_stream(client):
    *chunks, last = streamed(client, stream_options={"include_usage": True})[2]
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = streamed(
        client, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )[2]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens == 24


def test_the_best_of_several(client):
    """The answer holds the most likely of the n samples, in order; the usage counts all samples."""
    every = complete(client, n=5, logprobs=0).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    answer = complete(client, n=2, best_of=5)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.choices[
        0
    ].logprobs is None
    assert answer.usage.completion_tokens == 5 * 24


def test_a_beam_search(http):
    """A beam search, asked for as vLLM's clients do, gives n beams, or of `beam_width` the best n,
    with scores.
    """
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "use_beam_search": True,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    every = http.post(
        "/v1/completions", json=body | {"n": 4, "length_penalty": 0.5, "early_stopping": "never"}
    ).json()
    scores = [choice["score"] for choice in every["choices"]]
    assert [choice["index"] for choice in every["choices"]] == [0, 1, 2, 3] and scores == sorted(
        scores, reverse=True
    )
    one = http.post(
        "/v1/completions",
        json=body
        | {"beam_width": 4, "length_penalty": 0.5, "early_stopping": "never", "logprobs": 1},
    ).json()
    assert [choice["token_ids"] for choice in one["choices"]] == [every["choices"][0]["token_ids"]]
    assert sum(one["choices"][0]["logprobs"]["token_logprobs"]) / 12**0.5 == pytest.approx(
        scores[0]
    )
    assert (
        every["usage"]["completion_tokens"] == 4 * 12
        and "score" not in http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]
    )
    text = every["choices"][0]["text"]
    stop = next(letter for letter in text if letter.isascii() and letter.strip())
    stopped = http.post("/v1/completions", json=body | {"n": 4, "stop": stop}).json()
    assert not any(stop in choice["text"] for choice in stopped["choices"])
    assert any(choice["stop_reason"] == stop for choice in stopped["choices"])


def test_cached_prompt_tokens_are_counted(client):
    prompt = "This prompt fills more than one block of sixteen tokens."
    complete(client, prompt)
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens == 55
    other = {**READABLE["extra_body"], "cache_salt": "another user's"}
    assert complete(client, prompt, extra_body=other).usage.prompt_tokens_details.cached_tokens == 0


def test_echo(client):
    plain = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == "Hello" + plain
    assert complete(client, ids_of("Hello"), echo=True).choices[0].text == "Hello" + plain
    assert streamed(client, echo=True)[0] == {0: "Hello" + plain}


def test_echo_with_logprobs_scores_the_prompt(client):
    scored = complete(client, echo=True, logprobs=1).choices[0].logprobs
    assert (
        scored.tokens[:5] == list("Hello")
        and len(scored.tokens) == 29
        and scored.text_offset == list(range(29))
    )
    assert scored.token_logprobs[0] is None and all(
        value <= 0 for value in scored.token_logprobs[1:]
    )
    only = complete(client, echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == "Hello" and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs == scored.token_logprobs[:5]


def test_logprobs_hold_the_token_and_the_best(client):
    scored = complete(client, logprobs=3).choices[0].logprobs
    for token, value, top in zip(
        scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True
    ):
        assert top[token] == value and len(top) in (3, 4)


def test_prompt_logprobs_and_token_ids(http):
    body = {
        "prompt": "Hello",
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "max_tokens": 3,
        "allowed_token_ids": LETTERS,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids_of("Hello") and choice["token_ids"] == ids_of(
        choice["text"]
    )
    assert choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1].keys() == {
        str(ids_of("e")[0])
    }
    body = {"prompt": "Hello", "logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 3}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])


def test_stop_texts_that_span_tokens(client):
    whole = complete(client).choices[0].text
    stop = whole[9:12]
    before = whole[: whole.index(stop)]
    answer = complete(client, stop=["never", stop]).choices[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (before, "stop", stop)
    assert streamed(client, stop=stop)[:2] == ({0: before}, {0: "stop"})
    kept = {**READABLE["extra_body"], "include_stop_str_in_output": True}
    assert streamed(client, stop=stop, extra_body=kept)[0] == {0: before + stop}


def test_a_stop_token(client):
    whole = complete(client).choices[0].text
    extra = {**READABLE["extra_body"], "stop_token_ids": ids_of(whole[5])}
    answer = complete(client, extra_body=extra).choices[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ids_of(whole[5])[0])
    assert answer.text == whole[: whole.index(whole[5])]


def test_characters_of_several_tokens_are_streamed_whole(client):
    extra = {"allowed_token_ids": sorted(set(ids_of("é"))), "ignore_eos": True}
    whole = complete(client, extra_body=extra, seed=1, max_tokens=64).choices[0].text
    texts, _, chunks = streamed(client, extra_body=extra, seed=1, max_tokens=64)
    assert texts == {0: whole} and "é" in whole and "\ufffd" in whole
    assert len(chunks) > 1


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_depend_on_no_chunk(client, echo):
    """Text is held back behind parts of characters and what may become a stop text; how it is cut
    depends on timing and guesses.
    """
    options = {
        "prompt": "Hé",
        "echo": echo,
        "logprobs": 0,
        "max_tokens": 40,
        "stop": "ee" * 9,
        "extra_body": {"allowed_token_ids": sorted(set(ids_of("ée"))), "ignore_eos": True},
    }
    whole = complete(client, **options).choices[0].logprobs
    parts = [
        choice.logprobs
        for chunk in streamed(client, **options)[2]
        for choice in chunk.choices
        if choice.logprobs
    ]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert any(token.startswith("bytes:") for token in whole.tokens)
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


def test_seeds_and_extras(client):
    assert complete(client).choices[0].text == complete(client).choices[0].text
    assert complete(client, seed=4).choices[0].text != complete(client).choices[0].text
    only = {**READABLE["extra_body"], "top_k": 1}
    assert (
        complete(client, extra_body=only).choices[0].text
        == complete(client, temperature=0).choices[0].text
    )
    (a,) = ids_of("a")
    assert complete(client, logit_bias={str(a): 100}).choices[0].text == "a" * 24
    bad = {
        **READABLE["extra_body"],
        "bad_words": list("abcdefg"),
        "repetition_penalty": 1.2,
        "min_p": 0.1,
    }
    assert complete(client, extra_body=bad).choices[0].text == "h" * 24


def test_a_request_may_bring_its_id(http):
    body = {"prompt": "Hello", "request_id": "mine", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).json()["id"] == "cmpl-mine"


def test_the_form_of_a_stream(http):
    response = http.post(
        "/v1/completions",
        json={"prompt": "Hello", "stream": True, "max_tokens": 4, "allowed_token_ids": LETTERS},
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events_of(response.iter_lines())[-1]["choices"][0]["finish_reason"] == "length"


def test_prompts_far_too_long_are_refused_untokenized(http):
    answer = http.post("/v1/completions", json={"prompt": "x" * 30_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "This model's maximum context length is 512 tokens, the prompt has at least 3750"
    )


def test_timings_say_where_the_time_went(http, client):
    fields = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    assert "timings" not in http.post("/v1/completions", json=fields).json()
    timings = http.post(
        "/v1/completions", json=fields | {"timings": True, "n": 3, "temperature": 1}
    ).json()["timings"]
    assert timings["num_steps"] == 3 * 4 and timings["max_batch_size"] == 3
    assert timings["prefill_s"] > 0 and timings["decode_s"] > 0 and timings["num_preemptions"] == 0
    assert set(timings) >= {"queued_s", "cached_tokens", "num_swaps", "waits", "reason"}
    *_, last = complete(client, stream=True, extra_body=READABLE["extra_body"] | {"timings": True})
    assert last.choices == [] and last.timings["num_steps"] == 24 and last.usage is None
    stopped = complete(
        client, stop=["a", "b", "c", "d"], extra_body=READABLE["extra_body"] | {"timings": True}
    )
    assert stopped.choices[0].finish_reason == "stop" and 0 < stopped.timings["num_steps"] <= 24
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "timings": True}
    assert http.post("/v1/chat/completions", json=chat).json()["timings"]["num_steps"] <= 2


def test_a_pattern_ends_the_answer_whole_and_in_a_stream(client):
    whole = complete(client).choices[0].text
    extra = {"stop_regex": [f"{whole[6]}[{whole[7]}]"], **READABLE.get("extra_body", {})}
    ended = complete(client, extra_body=extra).choices[0]
    assert ended.finish_reason == "stop" and ended.text == whole[: whole.index(whole[6:8])]
    texts, reasons, _ = streamed(client, extra_body=extra)
    assert texts == {0: ended.text} and reasons == {0: "stop"}


def test_an_answer_in_a_loop_ends_with_repetition(http):
    body = {
        "prompt": "Hello",
        "max_tokens": 100,
        "ignore_eos": True,
        "allowed_token_ids": ids_of("a"),
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    }
    answer = http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("repetition", "aaa")
    assert choice["stop_reason"] == "repetition_detected"
    for fault in ({"max_pattern_size": 300}, {"max_pattern_size": 2, "size": 1}, {}, 7):
        refused = http.post("/v1/completions", json=body | {"repetition_detection": fault})
        assert refused.status_code == 400, refused.text
        assert "repetition_detection" in refused.json()["error"]["param"]


def test_a_pattern_that_cannot_be_searched_is_refused(http):
    for pattern in ("(", "a+", "(?<=a)b", "x{2000}", 5, [["a"]]):
        body = {"prompt": "Hello", "stop_regex": pattern}
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith("stop_regex")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_logprobs_of_listed_tokens(http, path):
    """Each place shows the tokens that are asked for beside the drawn one, as all of them show."""
    asked = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    )
    body = asked | {"max_tokens": 6, "seed": 1, "ignore_eos": True}
    body["logprob_token_ids"] = ids_of("az~")
    answer = http.post(path, json=body | {"return_token_ids": True}).json()["choices"][0]
    drawn = answer["token_ids"]
    if "chat" in path:
        tops = [
            {entry["token"]: entry["logprob"] for entry in place["top_logprobs"]}
            for place in answer["logprobs"]["content"]
        ]
    else:
        tops = answer["logprobs"]["top_logprobs"]
    assert len(tops) == len(drawn) == 6
    assert all({"a", "z", "~"} <= set(top) and len(top) <= 4 for top in tops)
    told = http.post(path, json=body | {"stream": True})
    assert told.status_code == 200
    refused = http.post(path, json=body | {"logprob_token_ids": [10**6]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logprob_token_ids"


def test_an_echoed_prompt_stands_before_listed_tokens(http):
    body = {"prompt": "Hi", "max_tokens": 3, "echo": True, "logprob_token_ids": ids_of("a")}
    told = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == 5 and told["token_logprobs"][0] is None
    assert all("a" in top for top in told["top_logprobs"][2:])
