"""The experts pass: ranks that have some of the experts each compute together the bits of the whole
Program (reference backend, in threads).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.reference.backend import ReferenceBackend
from octavo.models.registry import build_programs
from octavo.program.passes.experts import check_experts, share_experts
from octavo.program.passes.shard import shard
from octavo.program.program import Program
from tests.support.paged_runner import PagedRunner
from tests.support.ranks_in_threads import in_threads
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import tiny_model

FAMILIES = ("qwen2_moe", "gpt_oss", "deepseek_v3", "mixtral", "llama4_text", "granitemoe")
"""Experts with and without biases, of a tensor each and of one for all, and rows with weights."""


def ids_of(vocab_size: int) -> NDArray:
    return np.random.default_rng(5).integers(0, vocab_size, 30)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_are_the_whole_bit_by_bit(family: str, num_ranks: int) -> None:
    tiny = tiny_model(family)
    ids = ids_of(tiny.config["vocab_size"])
    wanted = PagedRunner(tiny.path).logits(ids)

    def run(rank: int, backend: ReferenceBackend) -> NDArray:
        rewrite = partial(share_experts, rank=rank, num_ranks=num_ranks)
        return PagedRunner(tiny.path, backend, rewrite=rewrite).logits(ids)

    for found in in_threads(num_ranks, run):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("num_places", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_that_share_experts_have_the_bits_of_one(family: str, num_places: int) -> None:
    """Two engines with other tokens each, and other numbers of them."""
    tiny = tiny_model(family)
    all_ids = ids_of(tiny.config["vocab_size"])
    own_ids = [all_ids[:19], all_ids[19:]]
    wanted = [PagedRunner(tiny.path).logits(ids) for ids in own_ids]

    def run(rank: int, backend: ReferenceBackend) -> NDArray:
        rewrite = partial(share_experts, rank=rank, num_ranks=2 * num_places, num_engines=2)
        return PagedRunner(tiny.path, backend, rewrite=rewrite).logits(own_ids[rank // num_places])

    for rank, found in enumerate(in_threads(2 * num_places, run)):
        np.testing.assert_array_equal(found, wanted[rank // num_places])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_that_are_packed_at_load_have_the_same_bits(quantization: str) -> None:
    tiny = tiny_model("qwen2_moe", **WIDTHS_OF_32["qwen2_moe"])
    program = build_programs(tiny.config)["decoder"]
    reader = WeightReader(open_checkpoint(tiny.path), "auto", quantization, program)
    ids = ids_of(tiny.config["vocab_size"])
    wanted = PagedRunner(tiny.path, load=reader.load).logits(ids)

    def run(rank: int, backend: ReferenceBackend) -> NDArray:
        rewrite = partial(share_experts, rank=rank, num_ranks=2)
        return PagedRunner(tiny.path, backend, load=reader.load, rewrite=rewrite).logits(ids)

    for found in in_threads(2, run):
        np.testing.assert_array_equal(found, wanted)


def decoder_of(family: str) -> Program:
    return build_programs(open_checkpoint(tiny_model(family).path).config)["decoder"]


def test_each_rank_has_its_own_experts_and_all_else() -> None:
    whole = decoder_of("qwen2_moe")
    parts = [share_experts(whole, rank, 3) for rank in range(3)]

    def size(program: Program) -> int:
        return sum(math.prod(weight.shape) for weight in program.weights)

    of_experts = [weight for weight in whole.weights if len(weight.shape) == 3]
    assert sum(map(size, parts)) - 2 * sum(
        math.prod(weight.shape) for weight in whole.weights if weight not in of_experts
    ) == size(whole)
    for part in parts:
        counts = Counter(op.kind for op in part.ops)
        assert counts["Dispatch"] == counts["Collect"] == counts["Combine"] == counts["Route"]
        assert {weight.whole for weight in part.weights} == set(whole.weights)


def test_the_experts_of_a_rank_are_split_once_more() -> None:
    """A weight keeps both cuts, in any order of the passes' ranks."""
    part = shard(share_experts(decoder_of("qwen2_moe"), 1, 2), 1, 2)
    weight = next(weight for weight in part.weights if len(weight.shape) == 3)
    assert weight.cut is not None and weight.cut.experts is not None
    assert weight.cut.rows is not None or weight.cut.inputs is not None
    assert weight.shape[0] == weight.cut.shape[0] // 2


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [("llama", 2, "got 2, but decoder has no experts"), ("qwen2_moe", 99, "got 99, but decoder")],
)
def test_what_has_too_few_experts_is_refused(family: str, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"expert_parallel_size: {message}") as refused:
        check_experts(decoder_of(family), num_ranks)
    assert refused.value.hint
