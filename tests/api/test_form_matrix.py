"""Drawn schemas beside every sampler, search and end: each finished answer meets its schema, and is
bit for bit the one of masks made beforehand, and of an engine that is short of memory and guesses.
"""

import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass

import jsonschema
import pytest

from octavo import AsyncLLM, SamplingParams, StructuredOutputs
from octavo.api.errors import InvalidRequest
from octavo.config.engine_config import EngineConfig
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_with_process
from tests.support.llm_tools import fingerprint, make_llm, prompts_of, small_options
from tests.support.proposers import all_verified, draft_counts, seldom_right, sequences
from tests.support.schemas import schemas_of_file, some_schema
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import tiny_model_with_text

UNFILTERED = {
    "sampled": {},
    "hot": {"temperature": 2.0},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {5: 9.0, 94: -20.0}, "logprobs": 2},
    "repetition": {"dry_multiplier": 1.0},
    "stop strings": {"stop": ["e", "7"]},
    "four samples": {"n": 4, "temperature": 2.0},
    "bad words": {"bad_words": ["%", "&"]},
}
CUT = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4, "logprobs": 1},
    "min_p": {"min_p": 0.2},
    "all cuts": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
}
FILTERED = {
    "typical": {"typical_p": 0.9, "top_n_sigma": 3.0},
    "exclusions": {"xtc_probability": 0.5, "dynatemp_range": 0.5},
    "mirostat 1": {"mirostat_mode": 1},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_tau": 3.0},
}
OTHERS = {
    "greedy": {"temperature": 0},
    "greedy, told": {"temperature": 0, "logprobs": 3},
    "at least 20 tokens": {"min_tokens": 20},
    "beams": {"beam_width": 3, "n": 2},
    "processors": {"logits_processors": ["favours_last"]},
}
WAYS = UNFILTERED | CUT | FILTERED | OTHERS
NUM = 50
"""Schemas of a file and drawn ones in the smallest tier, of each."""
NUM_TOGETHER = 25
"""Requests that a core has when it is killed."""


@dataclass(frozen=True)
class Asked:
    """One request of the matrix."""

    schema: dict
    way: str
    seed: int

    def params(self, **more) -> SamplingParams:
        form = StructuredOutputs(json=self.schema)
        return SamplingParams(
            **{"max_tokens": 90, "structured_outputs": form, "seed": self.seed}
            | WAYS[self.way]
            | more
        )


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    rng = random.Random(17)
    num = examples(NUM)
    schemas = [*schemas_of_file(rng, num), *(noted(some_schema(rng)) for _ in range(num))]
    ways = list(WAYS)
    return [
        Asked(schema, ways[index % len(ways)], rng.randrange(1000))
        for index, schema in enumerate(schemas)
    ]


def noted(schema: dict) -> dict:
    """Returns a schema of answers that are not too short to run out of memory."""
    note = {"type": "string", "minLength": 8, "maxLength": 16}
    return {
        "type": "object",
        "properties": {"of": schema, "note": note},
        "required": ["of", "note"],
        "additionalProperties": False,
    }


OPTIONS = {
    "backend": "native",
    "skip_tokenizer_init": False,
    "logits_processors": ("tests.support.processors:favours_last",),
}


def engine(**options):
    return make_llm(model_path=tiny_model_with_text(), **OPTIONS, **options)


@pytest.fixture(scope="module")
def answered(asked):
    """The requests whose schemas are taken, what they got, and the bytes of a KV block."""
    with engine() as llm:
        taken = [one for one in asked if is_taken(llm, one)]
        outputs = llm.generate(prompts_for(taken), [one.params() for one in taken])
        return taken, outputs, (64 << 20) // (llm.info.kv_capacity_tokens // 16)


def is_taken(llm, one: Asked) -> bool:
    try:
        llm.generate(prompts_of(3), one.params(max_tokens=1, min_tokens=0))
    except InvalidRequest:
        return False
    return True


def prompts_for(asked):
    """Makes prompts that share no block and fill two, so that answers soon need a third."""
    return [
        [3 + index % 250, 3 + index // 250, *prompts_of(24 + index % 6)[0]]
        for index in range(len(asked))
    ]


def test_each_finished_answer_meets_its_schema(answered):
    asked, outputs, _ = answered
    num_whole = 0
    for one, output in zip(asked, outputs, strict=True):
        assert output.error is None, (one, output.error)
        for sample in output.outputs:
            if sample.finish_reason == "stop" and sample.stop_reason is None:
                jsonschema.validate(json.loads(sample.text), one.schema)
                num_whole += 1
    assert num_whole > len(asked) / 2


def test_a_checked_draw_is_the_masked_one(answered):
    """A filter that keeps all tokens has the mask made beforehand."""
    asked, outputs, _ = answered
    chosen = [index for index, one in enumerate(asked) if one.way in UNFILTERED | CUT]
    prompts = prompts_for(asked)
    with engine() as llm:
        wanted = [asked[index].params(top_n_sigma=100) for index in chosen]
        masked = llm.generate([prompts[index] for index in chosen], wanted)
    for index, output in zip(chosen, masked, strict=True):
        assert fingerprint(output) == fingerprint(outputs[index]), asked[index]


def test_neither_guesses_nor_a_lack_of_memory_change_an_answer(answered):
    """Searches are left out: so few blocks bound how long their beams get."""
    asked, outputs, block_bytes = answered
    chosen = [index for index, one in enumerate(asked) if one.way != "beams"]
    prompts = [prompts_for(asked)[index] for index in chosen]
    asked, outputs = [asked[index] for index in chosen], [outputs[index] for index in chosen]
    known = [
        tokens
        for prompt, output in zip(prompts, outputs, strict=True)
        for tokens in sequences([output], [prompt])
    ]
    options = {
        "kv_cache_memory_bytes": 15 * block_bytes,
        "max_model_len": 128,
        "watermark": 0.0,
        "spec_method": "ngram",
    }
    with all_verified(seldom_right(known, 5)), engine(**options) as llm:
        found = llm.generate(prompts, [one.params() for one in asked])
        assert llm.get_metrics().num_preemptions > 0
        assert draft_counts(llm)[1] > 0
    for one, output, same in zip(asked, outputs, found, strict=True):
        assert fingerprint(output) == fingerprint(same), one


def test_a_request_draws_alone_what_it_draws_in_a_batch(answered):
    asked, outputs, _ = answered
    prompts = prompts_for(asked)
    with engine() as llm:
        for index in range(0, len(asked), 5):
            (alone,) = llm.generate([prompts[index]], asked[index].params())
            assert fingerprint(alone) == fingerprint(outputs[index]), asked[index]


def test_another_core_goes_on_with_each_answer(answered):
    """Each group of requests outlives the process of its core, killed among their tokens."""
    asked, outputs, _ = answered
    prompts = prompts_for(asked)
    options = small_options(model_path=tiny_model_with_text()) | OPTIONS
    frontend = build_with_process(EngineConfig.from_options(**options), quiet)
    llm = AsyncLLM(frontend)

    async def run(part: slice) -> list:
        requests = list(zip(prompts[part], asked[part], strict=True))
        streams = [llm.submit(prompt, one.params()) for prompt, one in requests]
        finals = [asyncio.create_task(stream.final()) for stream in streams]
        await asyncio.wait(finals, return_when=asyncio.FIRST_COMPLETED)
        os.kill(frontend.client.pid, signal.SIGKILL)
        return [await one for one in finals]

    parts = [slice(at, at + NUM_TOGETHER) for at in range(0, len(asked), NUM_TOGETHER)]
    parts = parts[: examples(1)]
    for part in parts:
        for one, output, same in zip(
            asked[part], outputs[part], asyncio.run(run(part)), strict=True
        ):
            assert fingerprint(output) == fingerprint(same), one
    assert llm.stats().num_restarts == len(parts)
    llm.close()
