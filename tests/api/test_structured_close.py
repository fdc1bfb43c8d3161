"""With structured_close an answer of a given form is whole when its length ends, wherever enough
tokens remain.
"""

import json
import random

import jsonschema
import pytest

from octavo import SamplingParams, StructuredOutputs
from octavo.api.errors import ConfigError
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import tiny_model_with_text

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 1},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "sizes", "next"],
            "additionalProperties": False,
        }
    },
}
LISTS = {"type": "array", "items": {"type": "array", "items": {"type": ["string", "boolean"]}}}
SHORTEST_TREE = len('{"name": "", "sizes": [0], "next": null}') + 1


@pytest.fixture(scope="module", params=["reference", "native"])
def llm(request):
    options = {"skip_tokenizer_init": False, "structured_close": True}
    with make_llm(model_path=tiny_model_with_text(), backend=request.param, **options) as llm:
        yield llm


def params(schema, **options) -> SamplingParams:
    form = schema if isinstance(schema, StructuredOutputs) else StructuredOutputs(json=schema)
    return SamplingParams(**{"seed": 7, "structured_outputs": form} | options)


WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "hot": {"temperature": 2, "logprobs": 1},
    "top_p": {"top_p": 0.8},
    "mirostat": {"mirostat_mode": 2},
    "penalties": {"repetition_penalty": 1.5, "n": 3},
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_answer_is_whole_whatever_its_length(llm, way):
    dice = random.Random(3)
    lengths = [SHORTEST_TREE, 45, 20, *(dice.randint(38, 150) for _ in range(examples(1)))]
    schemas = [TREE, TREE, LISTS, *(dice.choice([TREE, LISTS]) for _ in lengths[3:])]
    wanted = [
        params(schema, max_tokens=most, **way)
        for schema, most in zip(schemas, lengths, strict=True)
    ]
    for output, schema in zip(
        llm.generate(prompts_of(*range(3, 3 + len(wanted))), wanted), schemas, strict=True
    ):
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            jsonschema.validate(json.loads(sample.text), schema)


def test_a_closed_answer_is_the_same_alone_and_with_logprobs(llm):
    prompts = prompts_of(4, 9)
    wanted = [params(TREE, max_tokens=most, logprobs=1) for most in (40, 50)]
    together = llm.generate(prompts, wanted)
    for prompt, one, output in zip(prompts, wanted, together, strict=True):
        (alone,) = llm.generate([prompt], one)
        assert fingerprint(alone) == fingerprint(output)
        (plain,) = llm.generate([prompt], params(TREE, max_tokens=one.max_tokens))
        assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_an_answer_with_room_is_left_as_it_is(llm):
    small = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    (near,) = llm.generate(prompts_of(5), params(small, max_tokens=60))
    (far,) = llm.generate(prompts_of(5), params(small, max_tokens=240))
    assert fingerprint(near) == fingerprint(far)


def test_an_answer_without_room_is_a_beginning(llm):
    (output,) = llm.generate(prompts_of(4), params(TREE, max_tokens=SHORTEST_TREE - 1))
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.startswith("{")


@pytest.mark.parametrize("form", [{"regex": "(a|b)*c"}, {"grammar": 'start: "(" start? ")"'}])
def test_other_forms_are_completed_too(llm, form):
    for seed in range(3):
        wanted = params(StructuredOutputs(**form), max_tokens=20, seed=seed)
        (output,) = llm.generate(prompts_of(4), wanted)
        assert output.outputs[0].finish_reason == "stop"


def test_a_ban_goes_before_the_close(llm):
    """A banned token is not written to complete an answer."""
    (brace,) = llm.get_tokenizer().encode("}", add_special_tokens=False)
    anything = [i for i in range(260) if i != brace]
    (output,) = llm.generate(prompts_of(4), params(TREE, max_tokens=60, allowed_token_ids=anything))
    assert output.error is not None or "}" not in output.outputs[0].text


def test_the_torch_backend_refuses_it_by_name():
    with pytest.raises(ConfigError, match="structured_close: requires the native or ref"):
        make_llm(backend="torch", structured_close=True)
