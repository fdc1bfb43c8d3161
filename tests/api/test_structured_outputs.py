"""Answers have the form that they were asked for, however they are drawn and whatever happens on
the way.
"""

import json
import random

import jsonschema
import pytest

from octavo import SamplingParams, StructuredOutputs
from octavo.api.errors import InvalidRequest
from octavo.executor.native.backend import NativeProgram
from octavo.executor.reference.backend import ReferenceRunnable
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.schemas import some_schema
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import tiny_model_with_text

pytestmark = pytest.mark.sampled(one_in=2)

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square", "äöü"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
SCHEMA["properties"]["sizes"]["maxItems"] = 3


@pytest.fixture(scope="module")
def llm(backend):
    path, options = tiny_model_with_text(), {"backend": backend, "skip_tokenizer_init": False}
    # What a form forces is guessed in `tests/equivalence`; here each step draws one token.
    with make_llm(model_path=path, spec_method="none", **options) as llm:
        yield llm


def params(form, **options) -> SamplingParams:
    if isinstance(form, dict):
        form = StructuredOutputs(json=form)
    return SamplingParams(**{"max_tokens": 180, "seed": 7, "structured_outputs": form} | options)


MODES = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "hot": {"temperature": 2},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {5: 9.0, 94: -20.0}},
    "with logprobs": {"logprobs": 3},
    "two samples": {"n": 2},
    "four hot samples": {"n": 4, "temperature": 2},
    "every filter": {"typical_p": 0.9, "xtc_probability": 0.5, "top_n_sigma": 3.0, "min_p": 0.01},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 3.0},
    "repetition": {"dry_multiplier": 1.0},
    "listed logprobs": {"logprob_token_ids": [5, 94]},
    "at least 40 tokens": {"min_tokens": 40},
    "bad words": {"bad_words": ["1", "25"]},
}


def check(output, schema) -> None:
    """Checks that each complete answer meets the schema, and that others are its beginnings."""
    for sample in output.outputs:
        assert output.error is None
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(sample.text), schema)
        else:
            assert sample.finish_reason == "length"


def strings_of(*names):
    """Returns a schema of short texts."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 4} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_answer_meets_its_schema(llm, mode):
    (output,) = llm.generate(prompts_of(9), params(SCHEMA, **mode))
    check(output, SCHEMA)
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}


def test_drawn_schemas_are_met_in_every_mode(llm):
    rng = random.Random(4)
    schemas = [some_schema(rng) for _ in range(examples(10))]
    modes = [rng.choice(list(MODES.values())) for _ in schemas]
    wanted = [
        params(schema, **mode, seed=rng.randrange(99))
        for schema, mode in zip(schemas, modes, strict=True)
    ]
    outputs = llm.generate(prompts_of(*range(3, 3 + len(schemas))), wanted)
    for output, schema in zip(outputs, schemas, strict=True):
        check(output, schema)


def test_a_request_draws_alone_what_it_draws_in_a_batch(llm):
    prompts = prompts_of(4, 9, 17)
    wanted = [params(strings_of("a"), logprobs=1, **MODES[mode]) for mode in ("greedy", "top_p")]
    wanted.append(SamplingParams(max_tokens=30, seed=1, logprobs=1))
    together = [fingerprint(output) for output in llm.generate(prompts, wanted)]
    alone = [
        fingerprint(llm.generate([prompt], one)[0])
        for prompt, one in zip(prompts, wanted, strict=True)
    ]
    assert together == alone


EVERY = {"top_n_sigma": 100.0}
"""A filter that keeps all tokens, and has the mask made before the draw; greedy takes none."""


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "mode", ["sampled", "hot", "penalties", "biased", "bad words", "top_k", "top_p", "min_p"]
)
def test_a_checked_draw_is_the_masked_one(llm, mode):
    prompts = prompts_of(3, 8)
    options = [MODES[mode] | {"seed": seed, "logprobs": 2} for seed in range(2)]
    schema = strings_of("a", "b")
    checked = llm.generate(prompts, [params(schema, **one) for one in options])
    masked = llm.generate(prompts, [params(schema, **one | EVERY) for one in options])
    assert [fingerprint(one) for one in checked] == [fingerprint(one) for one in masked]


def test_drawn_schemas_give_one_answer_alone_in_a_batch_and_under_masks(llm):
    """A sample of schemas, half of them greedy, each asked for in three ways."""
    rng = random.Random(11)
    schemas = [some_schema(rng) for _ in range(examples(8))]
    modes = [rng.choice([{"temperature": 0}, {}, {"temperature": 2}]) for _ in schemas]
    prompts = prompts_of(*range(3, 3 + len(schemas)))
    wanted = [
        params(schema, **mode, max_tokens=60) for schema, mode in zip(schemas, modes, strict=True)
    ]
    under = [
        params(schema, **mode | EVERY, max_tokens=60)
        for schema, mode in zip(schemas, modes, strict=True)
    ]
    together = [fingerprint(output) for output in llm.generate(prompts, wanted)]
    alone = [
        fingerprint(llm.generate([prompt], one)[0])
        for prompt, one in zip(prompts, wanted, strict=True)
    ]
    assert together == alone
    assert [fingerprint(output) for output in llm.generate(prompts, under)] == together


def test_a_pattern_and_a_loop_end_an_answer_before_its_form_does(llm):
    (output,) = llm.generate(prompts_of(4), params(SCHEMA, stop_regex='"[st]izes"'))
    assert output.outputs[0].stop_reason == '"[st]izes"'
    endless = StructuredOutputs(regex="a{1,100}")
    rule = {"max_pattern_size": 1, "min_count": 4}
    (output,) = llm.generate(
        prompts_of(4), params(endless, repetition_detection=rule, temperature=0, min_tokens=8)
    )
    assert output.outputs[0].finish_reason in ("repetition", "stop")
    assert set(output.outputs[0].text) == {"a"}


def test_a_masked_draw_is_the_ordinary_one_where_all_is_legal(llm):
    free = SamplingParams(max_tokens=12, seed=3, bad_words=[])
    anything = StructuredOutputs(regex="(.|\\n)*")
    (plain,), (formed,) = (
        llm.generate(prompts_of(5), msg) for msg in (free, params(anything, max_tokens=12, seed=3))
    )
    valid = plain.outputs[0].text
    if "\ufffd" not in valid and plain.outputs[0].finish_reason == "length":
        assert formed.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["yes", "no", "never"]}, {"yes", "no", "never"}),
        ({"regex": "(ab|cd){2}"}, {"abab", "abcd", "cdab", "cdcd"}),
        ({"grammar": 'start: "x" "y"?'}, {"x", "xy"}),
        ({"json": {"enum": [1, "a"]}}, {"1", '"a"'}),
    ],
)
def test_each_kind_of_form(llm, form, texts):
    outputs = llm.generate(
        prompts_of(3, 4, 5, 6), [params(StructuredOutputs(**form), seed=seed) for seed in range(4)]
    )
    assert {output.outputs[0].text for output in outputs} <= texts
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_an_answer_cut_by_its_length_is_a_beginning(llm):
    (output,) = llm.generate(prompts_of(4), params(SCHEMA, max_tokens=5))
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.startswith("{")


def test_a_stop_string_ends_an_answer_before_its_form_does(llm):
    (output,) = llm.generate(prompts_of(4), params(SCHEMA, stop=['"sizes"']))
    assert output.outputs[0].stop_reason == '"sizes"'


def test_allowed_ids_and_a_form_hold_together(llm):
    form = StructuredOutputs(regex="[a-z]{1,20}")
    letters = llm.get_tokenizer().encode("ab", add_special_tokens=False)
    (output,) = llm.generate(prompts_of(4), params(form, allowed_token_ids=[*letters, 2]))
    assert set(output.outputs[0].text) <= {"a", "b"}


def test_bans_that_leave_no_token_fail_that_request_alone(llm):
    wanted = [
        params(StructuredOutputs(choice=["a"]), allowed_token_ids=[7]),
        params(StructuredOutputs(choice=["a"])),
    ]
    failed, fine = llm.generate(prompts_of(4, 5), wanted)
    assert "no token can be sampled" in failed.error and "the grammar" in failed.error
    assert fine.outputs[0].text == "a"


def test_a_preempted_answer_goes_on_where_it_was(backend):
    """Three answers do not fit into 17 blocks at once."""
    path = tiny_model_with_text()
    options = {"backend": backend, "skip_tokenizer_init": False}
    prompts = prompts_of(90, 91, 92)
    form = StructuredOutputs(json=strings_of("a", "b"), disable_any_whitespace=False)
    wanted = [params(form, seed=seed) for seed in range(3)]
    with make_llm(model_path=path, **options) as llm:
        calm = llm.generate(prompts, wanted)
        block_bytes = (64 << 20) // (llm.info.kv_capacity_tokens // 16)
    options["kv_cache_memory_bytes"] = 17 * block_bytes
    with make_llm(model_path=path, **options) as llm:
        tight = llm.generate(prompts, wanted)
        assert llm.get_metrics().num_preemptions > 0
    assert [fingerprint(one) for one in tight] == [fingerprint(one) for one in calm]


def test_what_goes_with_no_form_is_refused(llm):
    with pytest.raises(InvalidRequest, match="ignore_eos: not supported with structured_outputs"):
        params(SCHEMA, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="#/properties/a/not"):
        llm.generate(prompts_of(4), params({"properties": {"a": {"not": {}}}}))


def test_an_engine_without_a_tokenizer_refuses_forms(backend):
    with (
        make_llm(backend=backend) as llm,
        pytest.raises(InvalidRequest, match="structured output requires a tokenizer"),
    ):
        llm.generate(prompts_of(4), params(SCHEMA))


def test_params_take_a_form_as_plain_data():
    made = SamplingParams(structured_outputs={"regex": "a"})
    assert made.structured_outputs == StructuredOutputs(regex="a")
    with pytest.raises(InvalidRequest, match="structured_outputs: got 3"):
        SamplingParams(structured_outputs=3)


FORCED = {
    "type": "object",
    "properties": {"a_long_name": {"enum": ["abcdef", "abcxyz"]}, "done": {"const": True}},
    "required": ["a_long_name", "done"],
    "additionalProperties": False,
}


def count_steps(llm) -> int:
    """Counts all steps so far: the last ones of a request that a stop string ends are counted
    before those of the next request.
    """
    llm.generate([[5]], SamplingParams(max_tokens=1))
    return llm.get_metrics().num_steps


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mode", ["greedy", "sampled", "top_k", "penalties", "two samples", "n"])
def test_text_without_a_choice_is_not_drawn(llm, mode):
    """Logprobs want each token drawn; without them the same tokens come in fewer steps."""
    options = MODES.get(mode, {"n": 3, "stop": ["xyz"]})
    form = StructuredOutputs(json=FORCED, disable_any_whitespace=True)
    prompts, steps = prompts_of(4, 9), []
    answers = []
    for told in ({"logprobs": 0}, {}):
        before = count_steps(llm)
        outputs = llm.generate(prompts, params(form, **options | told))
        steps.append(count_steps(llm) - before)
        answers.append([[sample.token_ids for sample in one.outputs] for one in outputs])
        for output in outputs:
            if mode != "n":
                check(output, FORCED)
    assert answers[0] == answers[1]
    assert steps[1] < steps[0] / 3


@pytest.mark.parametrize("mode", ["greedy", "hot", "top_p", "with logprobs", "at least 40 tokens"])
def test_text_without_a_choice_is_the_same_in_steps_of_many_rows(llm, mode, monkeypatch):
    """There each token of it takes a step, and no mask."""
    form = StructuredOutputs(json=FORCED, disable_any_whitespace=True)
    wanted = params(form, **MODES[mode])
    few = [fingerprint(output) for output in llm.generate(prompts_of(4, 9), wanted)]
    for program in (NativeProgram, ReferenceRunnable):
        monkeypatch.setattr(program, "max_forced_requests", 1)
    many = [fingerprint(output) for output in llm.generate(prompts_of(4, 9), wanted)]
    assert many == few


def test_text_without_a_choice_ends_at_the_length(llm):
    form = StructuredOutputs(json=FORCED, disable_any_whitespace=True)
    for most in (3, 17):
        outputs = llm.generate(prompts_of(4, 7), params(form, max_tokens=most))
        assert [len(one.outputs[0].token_ids) for one in outputs] == [most, most]
        assert {one.outputs[0].finish_reason for one in outputs} == {"length"}


def test_what_bans_a_token_without_a_choice_fails_its_request(llm):
    form = StructuredOutputs(choice=["abc"])
    (b,) = llm.get_tokenizer().encode("b", add_special_tokens=False)
    for ban in ({"bad_words": ["b"]}, {"allowed_token_ids": [b - 1, b + 1]}):
        (output,) = llm.generate(prompts_of(4), params(form, **ban))
        assert "no token can be sampled" in output.error


def search(form, **options) -> SamplingParams:
    usual = {"beam_width": 3, "n": 3, "max_tokens": 60, "structured_outputs": form}
    return SamplingParams(**usual | options)


def test_the_beams_of_a_form_have_it(llm, backend):
    form = StructuredOutputs(json=strings_of("a"))
    if backend == "torch":
        with pytest.raises(
            InvalidRequest, match="structured output with beam search is not supported by the torch"
        ):
            llm.generate(prompts_of(4), search(form))
        return
    outputs = llm.generate(prompts_of(4, 9), [search(form), search(form, logprobs=2, min_tokens=9)])
    for output in outputs:
        check(output, strings_of("a"))
        assert len({sample.text for sample in output.outputs}) == 3
    (alone,) = llm.generate(prompts_of(4), search(form))
    assert fingerprint(alone) == fingerprint(outputs[0])


def test_a_search_finds_the_likeliest_texts_of_a_form(llm, backend):
    """All texts of a small form, scored one by one, are the oracle."""
    if backend == "torch":
        return
    texts = ["ab", "ac", "b", "cab", "cb", "cc"]
    (output,) = llm.generate(
        prompts_of(6), search(StructuredOutputs(choice=texts), beam_width=6, n=6, logprobs=0)
    )
    prompt, scored = prompts_of(6)[0], {}
    for text in texts:
        ids = [*llm.get_tokenizer().encode(text, add_special_tokens=False), 2]
        told = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        (one,) = llm.generate([prompt + ids], told)
        places = zip(ids, one.prompt_logprobs[-len(ids) :], strict=True)
        scored[text] = sum(place[token].logprob for token, place in places) / len(ids)
    assert [sample.text for sample in output.outputs] == sorted(
        texts, key=lambda text: -scored[text]
    )
