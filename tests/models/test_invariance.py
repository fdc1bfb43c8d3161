"""A request's logits are bitwise the same whole or chunked, alone or in a batch, whatever blocks it
has: on the reference backend and, with batch_invariant, on torch."""

from functools import cache

import numpy as np
import pytest
import torch

from octavo.executor.base import BackendOptions
from octavo.executor.reference.backend import ReferenceBackend
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import each_family, tiny_model

torch.set_num_threads(1)

DECODERS = each_family()
LENGTH = 300


def tokens(family, length=LENGTH, seed=4):
    return np.random.default_rng(seed).integers(0, tiny_model(family).config["vocab_size"], length)


@cache
def whole(family, backend="reference"):
    return runner_of(family, backend).logits(tokens(family, lengths(backend)))


def runner_of(family, backend, **options):
    return PagedRunner(
        tiny_model(family).path, backend_named(backend, batch_invariant=True), **options
    )


def lengths(backend):
    """Returns the number of tokens of a test, a smaller one on torch, which is slow row by row."""
    return LENGTH if backend == "reference" else 120


CHUNKS = {"reference": [1, 7, 16, 255, 257], "torch": [7]}
"""Numbers of tokens a step; torch computes each row as a step of its own, whatever the chunk, so
that one number says nearly all that more would."""
LATER_CHUNKS = {"reference": [], "torch": [1, 16, 119]}


def each_chunk():
    for backend, chunks in CHUNKS.items():
        yield from ((chunk, backend) for chunk in chunks)
    for backend, chunks in LATER_CHUNKS.items():
        yield from (pytest.param(chunk, backend, marks=pytest.mark.slow) for chunk in chunks)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(("chunk", "backend"), each_chunk())
def test_chunked_is_whole(family, chunk, backend):
    runner = runner_of(family, backend, seed=chunk, padding=chunk % 3)
    np.testing.assert_array_equal(
        runner.logits(tokens(family, lengths(backend)), chunk), whole(family, backend)
    )


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("family", DECODERS)
def test_batched_is_alone(family, backend):
    """Three requests in steps that mix a chunk of one with single tokens of others get the logits
    they get alone.
    """
    runner = runner_of(family, backend, seed=9, padding=2)
    last = lengths(backend)
    prompts = [tokens(family, last), tokens(family, 40, seed=5), tokens(family, 41, seed=6)]
    a, b, c = (runner.add(prompt) for prompt in prompts)
    steps = [
        [(a, 0, 100), (b, 0, 40)],
        [(a, 100, 101), (c, 0, 39)],
        [(c, 39, 40), (a, 101, last - 1)],
        [(c, 40, 41), (a, last - 1, last)],
    ]
    found = {id(request): [] for request in (a, b, c)}
    for spans in steps:
        rows = iter(runner.step(spans)["logits"])
        for request, start, stop in spans:
            found[id(request)] += [next(rows) for _ in range(start, stop)]
    for request, prompt in zip((a, b, c), prompts, strict=True):
        alone = (
            whole(family, backend) if request is a else runner_of(family, backend).logits(prompt)
        )
        np.testing.assert_array_equal(np.stack(found[id(request)]), alone)


def test_a_step_may_sample_no_row():
    runner = PagedRunner(tiny_model("deepseek_v3").path)
    request = runner.add(tokens("deepseek_v3", 9))
    assert runner.step([(request, 0, 9)], sample=False)["logits"].shape == (0, 270)


def test_a_prefix_computed_by_another_request_is_as_good_as_ones_own():
    path, ids = tiny_model("gemma3_text").path, tokens("gemma3_text", 100)
    runner = PagedRunner(path)
    first = runner.add(ids)
    runner.step([(first, 0, 64)])
    second = runner.add(ids)
    second.blocks[:, :4] = first.blocks[:, :4]
    np.testing.assert_array_equal(
        runner.step([(second, 64, 100)])["logits"], PagedRunner(path).logits(ids)[64:]
    )


@pytest.mark.parametrize(
    ("kv_cache_dtype", "tolerance"),
    [("fp32", 1e-5), ("bf16", 0.3), ("int8", 0.3), ("k8v4", 3), ("int4", 4)],
)
def test_kv_is_read_as_stored(kv_cache_dtype, tolerance):
    """K and V are rounded in prefill too, so chunks still equal the whole. The tolerance is of the
    logits (std 1.2) against float64 K and V.
    """
    path, ids = tiny_model("llama").path, tokens("llama")
    backend = ReferenceBackend(BackendOptions(kv_cache_dtype=kv_cache_dtype))
    rounded = PagedRunner(path, backend).logits(ids)
    np.testing.assert_array_equal(PagedRunner(path, backend).logits(ids, 7), rounded)
    error = abs(rounded - whole("llama")).max()
    assert 0 < error < tolerance
