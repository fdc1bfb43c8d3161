"""The shard pass: ranks, in threads, compute together what the whole Program computes (reference
backend, 1e-9), each its part.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.models.registry import build_programs
from octavo.program import ops, rank_ops
from octavo.program.passes.fuse import fuse
from octavo.program.passes.shard import shard
from octavo.program.passes.splits import kv_spans, query_spans, shares
from octavo.program.program import CacheGroup, Op, Program, Value, Weight
from tests.support.paged_runner import PagedRunner
from tests.support.ranks_in_threads import in_threads
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import DISTINCT, tiny_model

torch.set_num_threads(1)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in DISTINCT},
    "llama-bias-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-4-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "gemma3-softcap": (
        "gemma3_text",
        {"final_logit_softcapping": 3.0, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "deepseek-plain": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    ),
}


def sharded_logits(path: Path, ids: NDArray, num_ranks: int, **options: Any) -> list[NDArray]:
    def run(rank: int, backend: ReferenceBackend) -> NDArray:
        return PagedRunner(
            path, backend, rewrite=partial(shard, rank=rank, num_ranks=num_ranks), **options
        ).logits(ids)

    return in_threads(num_ranks, run)


UNSPLIT = {"olmo2", "olmo3"}
"""Families that norm q and k over all heads together, which no rank has."""


def heads_of(config):
    """Returns the numbers of query and kv heads of a config's decoder; 4 of each, as many as the
    most ranks, where nothing attends.
    """
    decoder = build_programs(config)["decoder"]
    attention = [op for op in decoder.ops if isinstance(op, (ops.Attention, ops.MlaAttention))]
    if not attention:
        return 4, 4
    return attention[0].num_heads, decoder.groups[0].num_kv_heads


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_are_the_whole(case, num_ranks):
    family, overrides = CASES[case]
    tiny = tiny_model(family, **overrides)
    ids = np.random.default_rng(5).integers(0, tiny.config["vocab_size"], 40)
    wanted = PagedRunner(tiny.path).logits(ids)
    heads, kv_heads = heads_of(tiny.config)
    if family in UNSPLIT:
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            sharded_logits(tiny.path, ids, num_ranks)
        return
    if heads < num_ranks or (
        family != "deepseek_v3" and kv_heads < num_ranks and num_ranks % kv_heads
    ):
        with pytest.raises(
            ConfigError, match=rf"tensor_parallel_size: got {num_ranks}, but the model has"
        ):
            sharded_logits(tiny.path, ids, num_ranks)
        return
    found = sharded_logits(tiny.path, ids, num_ranks)
    for logits in found:
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-9 * abs(wanted).max())
        np.testing.assert_array_equal(logits, found[0], err_msg="every rank has the same bits")


def test_an_encoder_and_its_decoder():
    """T5 is split by the heads of every kind of attention, and so is the table of its biases."""
    path = tiny_model("t5").path
    whole = t5_logits(PagedRunner(path))
    found = in_threads(
        2,
        lambda rank, backend: t5_logits(
            PagedRunner(path, backend, rewrite=partial(shard, rank=rank, num_ranks=2))
        ),
    )
    np.testing.assert_allclose(found[0], whole, rtol=0, atol=1e-9 * abs(whole).max())


def t5_logits(runner: PagedRunner) -> NDArray:
    ids = np.random.default_rng(2).integers(3, 250, 30)
    request = runner.add(ids)
    runner.step([(request, 0, 30)], program="encoder")
    return runner.step([(request, 0, 20)])["logits"]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek_v3"])
def test_what_is_packed_at_load_is_the_same_bits_in_parts(family, quantization):
    """A part that is packed at load has the bits of the whole weight packed: scales are made of all
    inputs, which every rank has.
    """
    tiny = tiny_model(family, **WIDTHS_OF_32[family])
    program = build_programs(tiny.config)["decoder"]
    reader = WeightReader(open_checkpoint(tiny.path), "auto", quantization, program)
    ids = np.random.default_rng(5).integers(0, tiny.config["vocab_size"], 20)
    wanted = PagedRunner(tiny.path, load=reader.load).logits(ids)

    def run(rank: int, backend: ReferenceBackend) -> NDArray:
        rewrite = partial(shard, rank=rank, num_ranks=2)
        return PagedRunner(tiny.path, backend, load=reader.load, rewrite=rewrite).logits(ids)

    np.testing.assert_allclose(in_threads(2, run)[1], wanted, rtol=0, atol=1e-9 * abs(wanted).max())


def test_what_two_ranks_of_a_llama_are():
    """A rank of a llama has half of every part but the norms. Columns are gathered before and after
    the second matmul of each half of a layer, and the logits; the embedding is summed.
    """
    config = open_checkpoint(tiny_model("llama").path).config
    whole = build_programs(config)["decoder"]
    layers = config["num_hidden_layers"]
    parts = [fuse(shard(whole, rank, 2)) for rank in range(2)]
    for rank, part in enumerate(parts):
        assert Counter(op.kind for op in part.ops)["AllReduce"] == 1
        gathers = [op for op in part.ops if isinstance(op, rank_ops.AllGather)]
        assert [gather.widths for gather in gathers] == [
            *((32, 32), (32, 32), (50, 50), (32, 32)) * layers,
            (160, 160),
        ]
        assert gathers[-1].x.axis == "samples"
        assert all(weight.cut is None or weight.cut.inputs is None for weight in part.weights)
        assert part.groups[0].num_kv_heads == 1
        table = next(op for op in part.ops if isinstance(op, ops.Embedding))
        assert table.first_row == 160 * rank and table.table.shape == (160, 64)
        qkv = next(op for op in part.ops if isinstance(op, ops.Linear))
        assert [(weight.name.split(".")[-2], weight.shape) for weight in qkv.weights_] == [
            ("q_proj", (32, 64)),
            ("k_proj", (16, 64)),
            ("v_proj", (16, 64)),
        ]
        assert qkv.norm is not None, "the fuse pass folds as it does in a whole Program"
        gated = next(op for op in part.ops if isinstance(op, ops.Linear) and op.gate is not None)
        assert [weight.cut.rows for weight in gated.weights_] == [(50 * rank, 50 * rank + 50)] * 2
        assert {weight.whole for weight in part.weights} == set(whole.weights)
    sizes = [
        sum(math.prod(weight.shape) for weight in program.weights if len(weight.shape) > 1)
        for program in (whole, *parts)
    ]
    assert sizes[0] == sizes[1] + sizes[2]


def test_a_tied_table_is_cut_once():
    config = open_checkpoint(tiny_model("qwen2").path).config
    part = shard(build_programs(config)["decoder"], 1, 2)
    tables = [weight for weight in part.weights if weight.name == "model.embed_tokens.weight"]
    assert [(weight.shape, weight.cut.rows) for weight in tables] == [((128, 72), (129, 257))]


def test_biases_are_split_like_outputs():
    """Of gpt_oss's biases only the router's, which both ranks have, is whole."""
    whole = build_programs(open_checkpoint(tiny_model("gpt_oss").path).config)["decoder"]
    for rank in range(2):
        part = shard(whole, rank, 2)
        biases = {weight.name.split(".", 3)[-1]: weight for weight in part.weights}
        kept = {name for name, weight in biases.items() if "bias" in name and weight.cut is None}
        assert kept == {"mlp.router.bias"}


# -- shares ----------------------------------------------------------------------------------------


def test_shares_are_even_and_whole_units():
    assert shares(10, 3) == ((0, 4), (4, 7), (7, 10))
    assert shares(257, 2) == ((0, 129), (129, 257))
    assert shares(1536, 4, 256) == ((0, 512), (512, 768), (768, 1280), (1280, 1536))
    assert shares(50, 2, 32) == ((0, 32), (32, 50))


def group_of(num_kv_heads: int) -> CacheGroup:
    return CacheGroup("full", "full", 1, num_kv_heads, 8, 8)


def test_query_heads_stay_with_their_kv_heads():
    assert query_spans(9, group_of(3), 2) == ((0, 6), (6, 9))
    assert query_spans(8, group_of(8), 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert (kv_spans(group_of(2), 4), query_spans(8, group_of(2), 4)) == (
        ((0, 1), (0, 1), (1, 2), (1, 2)),
        ((0, 2), (2, 4), (4, 6), (6, 8)),
    )
    assert query_spans(3, group_of(1), 2) == ((0, 2), (2, 3))


# -- what is refused -------------------------------------------------------------------------------

X, Y, Z = (Value(name, "tokens", 32) for name in ("x", "y", "z"))


def program_of(*body: Op, out: Value = Z) -> Program:
    return Program("test", {"hidden": X}, {"hidden": out}, body, (group_of(4),))


ATTENTION = ops.Attention(Y, Z, "full", 0, 4, 1.0)


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [
        (
            "llama",
            3,
            ("got 3, but the model has 2 KV heads; expected a divisor or a multiple"),
        ),
        ("llama", 8, "got 8, but the model has only 4 attention heads"),
        ("deepseek_v3", 5, "got 5, but the model has only 4 attention heads"),
    ],
)
def test_heads_that_do_not_suffice_are_refused(family, num_ranks, message):
    whole = build_programs(open_checkpoint(tiny_model(family).path).config)["decoder"]
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {message}") as refused:
        shard(whole, 0, num_ranks)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            (ops.RmsNorm(X, Y, Weight("n", (32,)), 1e-5), ATTENTION),
            "Attention reads y, which cannot be split by heads",
        ),
        (
            (ops.HeadLinear(X, Z, Weight("w", (32, 32)), 1),),
            "the op HeadLinear cannot be split over ranks",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(body, message):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {message}"):
        shard(program_of(*body), 0, 2)


def test_one_rank_is_the_whole():
    program = program_of(ops.HeadLinear(X, Z, Weight("w", (32, 32)), 1))
    assert shard(program, 0, 1) is program


def test_native_refuses_by_name():
    whole = build_programs(open_checkpoint(tiny_model("llama").path).config)["decoder"]
    with pytest.raises(BackendUnavailable, match="the native backend cannot run the op AllReduce"):
        NativeBackend(BackendOptions()).prepare_program(
            shard(whole, 0, 2), WeightReader(open_checkpoint(tiny_model("llama").path)).load
        )
