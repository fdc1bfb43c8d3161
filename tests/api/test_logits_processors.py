"""Logits processors change the draws of the requests that name them, alone as in a batch, and fail
no other request.
"""

import pytest

from octavo import SamplingParams, StructuredOutputs
from octavo.api.errors import ConfigError, InvalidRequest
from tests.support import processors
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.tiny_tokenizer import tiny_model_with_text

NAMES = ("favours_last", "only_even", "raises", "returns_short", "returns_nan", "bans_all", "waits")
OPTIONS = tuple(f"tests.support.processors:{name}" for name in NAMES)


@pytest.fixture(scope="module", params=["reference", "native"])
def llm(request):
    options = {"skip_tokenizer_init": False, "logits_processor_timeout": 0.2, "max_num_seqs": 80}
    with make_llm(
        model_path=tiny_model_with_text(),
        backend=request.param,
        logits_processors=("last=" + OPTIONS[0], *OPTIONS[1:]),
        **options,
    ) as llm:
        yield llm


def params(*names, **options) -> SamplingParams:
    usual = {"max_tokens": 12, "seed": 5, "logprobs": 2, "ignore_eos": True}
    return SamplingParams(**usual | {"logits_processors": list(names)} | options)


WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "filtered": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "bad_words": ["a"]},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 3.0},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_request_draws_alone_what_it_draws_in_a_batch(llm, way):
    prompts = prompts_of(4, 9, 17)
    wanted = [params("last", **way), params(**way), params("last", "only_even", **way)]
    together = [fingerprint(output) for output in llm.generate(prompts, wanted)]
    alone = [
        fingerprint(llm.generate([prompt], one)[0])
        for prompt, one in zip(prompts, wanted, strict=True)
    ]
    assert together == alone
    assert len({str(one[0][1]) for one in together}) == 3


def test_a_processor_does_what_a_bias_does(llm):
    """Both are added to the model's logits, of which the logprobs are."""
    even = {i: -100.0 for i in range(llm.info.vocab_size) if i % 2}
    (processed,) = llm.generate(prompts_of(5), params("only_even", temperature=0))
    (biased,) = llm.generate(prompts_of(5), params(temperature=0, logit_bias=even))
    assert fingerprint(processed) == fingerprint(biased)
    assert all(token % 2 == 0 for token in processed.outputs[0].token_ids)


def test_a_processor_and_a_form_hold_together(llm):
    form = StructuredOutputs(regex="[a-f]{6,9}")
    for seed in range(3):
        wanted = params("only_even", structured_outputs=form, ignore_eos=False, seed=seed)
        (output,) = llm.generate(prompts_of(4), wanted)
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop" and set(text) <= set("abcdef")
        *letters, end = output.outputs[0].token_ids
        assert end == 2 and all(token % 2 == 0 for token in letters)


def test_more_rows_than_the_backend_checks_at_once(llm):
    prompts = prompts_of(*range(3, 75))
    wanted = [params(*("last",) * (i % 3 > 0), max_tokens=3) for i in range(72)]
    together = llm.generate(prompts, wanted)
    for place in (0, 1, 70, 71):
        (alone,) = llm.generate([prompts[place]], wanted[place])
        assert fingerprint(alone) == fingerprint(together[place])


FAULTS = {
    "raises": r"processor 'raises' raised ValueError: it does not like 4 tokens",
    "returns_short": r"returned float32 of the shape \(\d+,\), expected numbers of the shape",
    "returns_nan": "returned NaN logits",
    "bans_all": "no token can be sampled after 4 tokens: .*logits_processors",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_request_alone(llm, name):
    failed, fine = llm.generate(prompts_of(4, 6), [params(name), params("last")])
    with pytest.raises(AssertionError, match=FAULTS[name]):
        fingerprint(failed)
    assert fingerprint(fine) == fingerprint(llm.generate(prompts_of(4, 6)[1:], params("last"))[0])


def test_a_call_that_does_not_end_fails_its_request_alone(llm):
    processors.released.clear()
    failed, fine = llm.generate(prompts_of(4, 6), [params("waits"), params("last")])
    assert "'waits' took more than 0.2 s" in failed.error and fine.error is None
    (again,) = llm.generate(prompts_of(4), params("waits"))
    assert "'waits' is still running an earlier call" in again.error
    processors.released.set()
    (output,) = llm.generate(prompts_of(4), params("last"))
    assert output.error is None


def test_what_cannot_be_is_refused_by_name(llm):
    with pytest.raises(InvalidRequest, match=r"logits_processors: got 'no', expected .*: last,"):
        llm.generate(prompts_of(4), params("no"))
    with pytest.raises(InvalidRequest, match=r"logits_processors: got .* with prompt_logprobs"):
        params("last", prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match=r"logits_processors: got .* in a beam search"):
        params("last", beam_width=2, seed=None, temperature=0)
    with pytest.raises(InvalidRequest, match="at most 8 names"):
        params(*["last"] * 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nothing",), r"got 'nothing', expected NAME=MODULE:FUNCTION"),
        (("no_such_module:f",), "no_such_module:f cannot be imported: ModuleNotFoundError"),
        (("tests.support.processors:NUMBER",), "is 3, expected a function"),
        (OPTIONS[:1] * 2, "got 'favours_last' twice"),
    ],
)
def test_an_option_that_names_no_function_is_refused(given, message):
    with pytest.raises(ConfigError, match=f"logits_processors: .*{message}|{message}"):
        make_llm(logits_processors=given)


def test_the_torch_backend_refuses_them_by_name():
    with pytest.raises(ConfigError, match="logits_processors: requires the native or ref"):
        make_llm(backend="torch", logits_processors=OPTIONS[:1])
