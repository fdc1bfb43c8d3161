"""Tiny models on the native backend: a request's logits are bitwise the same in any company,
chunks, threads, blocks; and they are right.

Right is: in fp32 within 2e-4 of transformers in float64 (logits of size 10); in other precisions
within what their rounding was seen to do, of the reference backend on the same weights.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.models import registry
from octavo.models.registry import build_programs
from tests.support.native_harness import require_native
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import NATIVE_FAMILIES, double_precision, in_float64, tiny_model

torch.set_num_threads(1)

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "qwen2_moe"]
PRECISIONS = ["fp32", "bf16", "int8", "int4"]
LENGTH = 530
"""Number of tokens; more than two splits of 256 keys."""


def model_of(family, precision):
    return tiny_model(family, **(WIDTHS_OF_32[family] if precision == "int4" else {}))


def tokens(family, length=LENGTH, seed=4):
    return np.random.default_rng(seed).integers(0, tiny_model(family).config["vocab_size"], length)


def runner(family, precision, *, threads=1, level=None, backend=None, seed=0, padding=0):
    """Returns the tiny model in a precision: fp32 as its file has it, bf16, or packed at load."""
    require_native()
    path = model_of(family, precision).path
    checkpoint = open_checkpoint(path)
    program = build_programs(checkpoint.config)["decoder"]
    dtype = {"bf16": "bfloat16"}.get(precision, "auto")
    reader = WeightReader(
        checkpoint, dtype, precision if precision in ("int8", "int4") else None, program
    )
    backend = backend or NativeBackend(
        BackendOptions(num_threads=threads, max_tokens=1200), level=level
    )
    return PagedRunner(path, backend, load=reader.load, seed=seed, padding=padding)


@cache
def whole(family, precision):
    """Computes one request alone, in one step on one thread."""
    return runner(family, precision).logits(tokens(family))


GRID = [
    *((family, precision) for family in FAMILIES for precision in PRECISIONS),
    ("bloom", "fp32"),
    ("bloom", "bf16"),
    ("deepseek_v3", "fp32"),
    ("deepseek_v3", "bf16"),
    *(
        pytest.param(family, precision, marks=pytest.mark.slow)
        for family in NATIVE_FAMILIES
        if family not in (*FAMILIES, "bloom", "deepseek_v3")
        for precision in ("fp32", "int8")
    ),
]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("family", "precision"), GRID)
@pytest.mark.parametrize(("chunk", "threads"), [(1, 2), (7, 1), (16, 3), (255, 7), (257, 2)])
def test_chunked_is_whole(family, precision, chunk, threads):
    """Chunks give the bits of the whole, in other blocks and beside padded rows too."""
    found = runner(family, precision, threads=threads, seed=chunk, padding=chunk % 3).logits(
        tokens(family), chunk
    )
    np.testing.assert_array_equal(found, whole(family, precision))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("family", "precision"), GRID)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_matter(family, precision, threads):
    np.testing.assert_array_equal(
        runner(family, precision, threads=threads).logits(tokens(family)), whole(family, precision)
    )


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("family", "precision"), GRID)
def test_batched_is_alone(family, precision):
    """Five requests, in steps that mix chunks of some with single tokens of others."""
    batched = runner(family, precision, threads=2, seed=9, padding=2)
    prompts = [
        tokens(family),
        tokens(family, 40, seed=5),
        tokens(family, 41, seed=6),
        tokens(family, 1, seed=7),
        tokens(family, 300, seed=8),
    ]
    a, b, c, d, e = (batched.add(prompt) for prompt in prompts)
    steps = [
        [(a, 0, 100), (b, 0, 40), (d, 0, 1)],
        [(a, 100, 101), (c, 0, 39)],
        [(c, 39, 40), (a, 101, 529), (e, 0, 299)],
        [(c, 40, 41), (a, 529, 530), (e, 299, 300)],
    ]
    found = {id(request): [] for request in (a, b, c, d, e)}
    for spans in steps:
        rows = iter(batched.step(spans)["logits"])
        for request, start, stop in spans:
            found[id(request)] += [next(rows) for _ in range(start, stop)]
    alone = runner(family, precision)
    for request, prompt in zip((a, b, c, d, e), prompts, strict=True):
        wanted = whole(family, precision) if request is a else alone.logits(prompt)
        np.testing.assert_array_equal(np.stack(found[id(request)]), wanted)


@pytest.mark.parametrize(("family", "precision"), GRID)
def test_a_prefix_that_another_request_computed_is_as_good(family, precision):
    ids = tokens(family)
    shared = runner(family, precision)
    first = shared.add(ids)
    shared.step([(first, 0, 320)])
    second = shared.add(ids)
    second.blocks[:, :20] = first.blocks[:, :20]
    for table, found, group in zip(second.blocks, first.blocks, shared.groups, strict=True):
        if group.kind == "state":
            table[:] = found
    np.testing.assert_array_equal(
        shared.step([(second, 320, LENGTH)])["logits"], whole(family, precision)[320:]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_transformers(family):
    """Greedy tokens are equal, too: the best token of every position."""
    ids = tokens(family)
    model = in_float64(tiny_model(family).model)
    with double_precision():
        wanted = model(torch.tensor(ids)[None]).logits[0].numpy()
    found = whole(family, "fp32")
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=0)
    top = np.sort(wanted, axis=1)
    clear = top[:, -1] - top[:, -2] > 1e-3
    np.testing.assert_array_equal(found.argmax(1)[clear], wanted.argmax(1)[clear])


ERRORS = {"fp32": 5e-6, "bf16": 0.025, "int8": 0.08, "int4": 0.08}
"""Root mean square of the error over that of the logits: twice the worst that was seen."""


def error_of(family, found, wanted):
    """Returns the error over all logits; with experts the middle row's, for rounding sends a few
    rows to other experts.
    """
    axis = 1 if registry.FAMILIES[family].kind == "experts" else None
    return np.median(np.sqrt(((found - wanted) ** 2).mean(axis) / (wanted**2).mean(axis)))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("family", "precision"), GRID)
def test_is_the_reference(family, precision):
    """The native backend computes the reference's logits over the same packed weights, within
    bounds: the reference rounds neither rows nor the cache.
    """
    wanted = runner(family, precision, backend=ReferenceBackend()).logits(tokens(family))
    assert error_of(family, whole(family, precision), wanted) <= ERRORS[precision]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_level(level, precision, family):
    """Chunked and threaded is whole and alone, and near the best level's logits."""
    ids = tokens(family, 70)
    wanted = runner(family, precision, level=level).logits(ids)
    np.testing.assert_array_equal(
        runner(family, precision, level=level, threads=3, seed=2, padding=1).logits(ids, 7), wanted
    )
    assert error_of(family, wanted, whole(family, precision)[:70]) <= ERRORS[precision]
