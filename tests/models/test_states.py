"""Recurrent states: what a step leaves of them, and what an engine does with them. Everything here
is bitwise, but for the sizes."""

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.api.errors import UnsupportedModel
from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import tiny_model

IDS = np.random.default_rng(3).integers(0, 281, 70)
BACKENDS = ["reference", "torch", "native"]


def runner_of(backend):
    return PagedRunner(tiny_model("mamba2").path, backend_named(backend, batch_invariant=True))


@pytest.mark.parametrize("kind", [ReferenceBackend, TorchBackend])
def test_states_are_kept_in_fp32(kind):
    """Two of 6 heads of 16 columns and 12 numbers in each of three layers, with two counts."""
    program = build_programs(tiny_model("mamba2").config)["decoder"]
    backend = kind(BackendOptions(num_threads=1, kv_cache_dtype="bf16"))
    layouts = backend.footprint(program, lambda weight: "F32").kv_layouts
    assert [layout.dtype for layout in layouts] == ["fp32", "fp32"]
    assert layouts[1].block_bytes == 3 * 2 * (6 * 16 * 12 + 1) * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_may_be_computed_again(backend):
    """A step that failed after some of its layers is run again from the states that it had read."""
    runner = PagedRunner(tiny_model("mamba").path, backend_named(backend))
    request = runner.add(IDS)
    runner.step([(request, 0, 40)])
    once = runner.step([(request, 40, 70)])["logits"]
    np.testing.assert_array_equal(runner.step([(request, 40, 70)])["logits"], once)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_goes_on_only_from_where_a_state_is(backend):
    runner = runner_of(backend)
    request = runner.add(IDS)
    runner.step([(request, 0, 20)])
    runner.step([(request, 20, 30)])
    assert np.isnan(runner.step([(request, 31, 32)])["logits"]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_that_another_request_has_left_begins_with_zeros(backend):
    runner = runner_of(backend)
    first, second = runner.add(IDS), runner.add(IDS[::-1].copy())
    whole = runner.step([(second, 0, 70)])["logits"]
    second.blocks = first.blocks
    runner.step([(first, 0, 50)])
    runner.step([(first, 50, 70)])
    found = [runner.step([(second, *span)])["logits"] for span in ((0, 50), (50, 70))]
    np.testing.assert_array_equal(np.concatenate(found), whole)


FEW = {"reference": "400KiB", "native": "380KiB"}
"""KV memory of each backend that is too little for three requests."""
LONGER = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_may_be_moved_to_another_block(backend):
    runner = runner_of(backend)
    request, moved = runner.add(IDS), runner.add(IDS)
    runner.step([(request, 0, 40)])
    for group, layout in enumerate(runner.layouts):
        block = np.empty(layout.block_bytes, np.uint8)
        for source, target in zip(
            request.blocks[group].tolist(), moved.blocks[group].tolist(), strict=True
        ):
            runner.kv.read_block(group, source, block)
            runner.kv.write_block(group, target, block)
    whole = runner.step([(request, 40, 70)])["logits"]
    np.testing.assert_array_equal(runner.step([(moved, 40, 70)])["logits"], whole)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_preempted_request_goes_on_where_it_was(mode, backend):
    """Blocks of keys hold one or two of three requests to their ends."""
    prompts = prompts_of(60, 70, 80)
    with make_llm("jamba", backend=backend) as llm:
        plain = llm.generate(prompts, LONGER)
    few = {"kv_cache_memory_bytes": FEW[backend], "max_model_len": 160, "max_num_seqs": 3}
    with make_llm("jamba", backend=backend, preemption_mode=mode, **few) as llm:
        found = llm.generate(prompts, LONGER)
        assert llm.get_metrics().num_preemptions > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_guess_that_does_not_hold_changes_nothing(dtype):
    """The row returns to the state before the guess and computes the tokens that held again, with
    each token's state rounded as one that is kept.
    """
    prompts = [[5, 6, 7, 8] * 15, *prompts_of(50)]
    with make_llm("mamba2", kv_cache_dtype=dtype) as llm:
        plain = llm.generate(prompts, GREEDY)
    with make_llm("mamba2", kv_cache_dtype=dtype, spec_method="ngram") as llm:
        found = llm.generate(prompts, GREEDY)
        stats = llm.get_metrics()
        assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


def test_samples_of_one_prompt_share_the_state_at_its_end():
    params = SamplingParams(temperature=0.8, seed=4, n=2, max_tokens=6, ignore_eos=True)
    with make_llm("mamba2", enable_prefix_caching=False) as llm:
        (apart,) = llm.generate(prompts_of(40), params)
        assert llm.get_metrics().prefix_hit_tokens == 0
    with make_llm("mamba2") as llm:
        (both,) = llm.generate(prompts_of(40), params)
        assert llm.get_metrics().prefix_hit_tokens == 32
    assert fingerprint(both) == fingerprint(apart)
    assert len({tuple(sample.token_ids) for sample in both.outputs}) == 2


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("mamba2", "native"),
        ("jamba", "native"),
        *(
            pytest.param(family, backend, marks=pytest.mark.slow)
            for family in ("mamba2", "jamba")
            for backend in ("reference", "torch")
        ),
    ],
)
def test_a_prompt_that_comes_again_is_computed_from_its_last_checkpoint(family, backend):
    """A prompt of 1,000 tokens has 8 computed the second time; one that parts from it after 600
    those behind 512; one that goes on behind its answer those behind token 1,024.
    """
    (prompt,) = prompts_of(1000)
    options = {"backend": backend, "max_model_len": 1200}
    with make_llm(family, enable_prefix_caching=False, **options) as llm:
        (plain,) = llm.generate([prompt], GREEDY)
        others = [[*prompt[:600], *prompts_of(90)[0]], [*prompt, *plain.outputs[0].token_ids, 9]]
        apart = llm.generate(others, GREEDY)
    with make_llm(family, **options) as llm:
        first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
        found = llm.generate(others, GREEDY)
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 992]
    assert [output.num_cached_tokens for output in found] == [512, 1024]
    for output, same in zip([first, second, *found], [plain, plain, *apart], strict=True):
        assert fingerprint(output) == fingerprint(same)


@pytest.mark.parametrize("backend", BACKENDS)
def test_beams_go_on_in_copies_of_a_state(backend):
    """Each beam has the logprobs of its text read as a prompt."""
    params = SamplingParams(n=3, beam_width=3, max_tokens=12, ignore_eos=True, logprobs=1)
    read = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    (prompt,) = prompts_of(40)
    with make_llm("mamba2", backend=backend) as llm:
        (found,) = llm.generate([prompt], params)
        for beam in found.outputs:
            (whole,) = llm.generate([[*prompt, *beam.token_ids]], read)
            expected = [
                step[token].logprob
                for step, token in zip(whole.prompt_logprobs[40:], beam.token_ids, strict=True)
            ]
            logprobs = [
                step[token].logprob
                for step, token in zip(beam.logprobs, beam.token_ids, strict=True)
            ]
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-6)


def test_states_run_as_many_requests_as_may_run():
    with make_llm("mamba2", max_num_seqs=4, enable_prefix_caching=False) as llm:
        llm.generate(prompts_of(30, 31, 32, 33), GREEDY)
        stats = llm.get_metrics()
        assert stats.num_steps < 50, "all four at once"


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_states_are_kept_on_disk_and_found_by_the_next_engine(backend, tmp_path):
    prompts = prompts_of(300, 310)
    options = {"backend": backend, "max_model_len": 400, "prefix_cache_dir": str(tmp_path)}
    with make_llm("jamba", **options) as llm:
        plain = llm.generate(prompts, GREEDY)
    with make_llm("jamba", **options) as llm:
        found = llm.generate(prompts, GREEDY)
        assert llm.get_metrics().external_hit_tokens > 0
    assert [output.num_cached_tokens for output in found] == [288, 304]
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("mamba2", {"n_groups": 4}, "num_heads is 6, expected .* = 6, a multiple of n_groups"),
        ("mamba2", {"time_step_limit": [0.1]}, "time_step_limit is .*, expected a list of"),
        ("mamba", {"conv_kernel": 0}, "conv_kernel is 0, expected an integer from 1 to 64"),
    ],
)
def test_what_is_not_honoured_is_refused(family, values, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_programs(tiny_model(family).config | values)
