"""Everything that the native backend cannot run is refused by name before any weight is read."""

from dataclasses import replace

import numpy as np
import pytest

from octavo import LLM
from octavo.api.errors import BackendUnavailable, UnsupportedModel
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.check import check
from octavo.executor.native.formats import FORMATS
from octavo.models.registry import build_programs
from octavo.program import ops, rank_ops
from octavo.program.program import CacheGroup, Program, Value, Weight
from octavo.quant.packed import Levels, PackedWeight
from tests.checkpoint.test_fp8 import in_fp8
from tests.support.native_harness import require_native
from tests.support.tiny_models import FAMILIES, NATIVE_FAMILIES, tiny_model

X, Y = Value("x", "samples", 4), Value("y", "samples", 4)
T, U, K, V = (Value(name, "tokens", 4) for name in ("t", "u", "k", "v"))
KV = CacheGroup("kv", "full", 1, 1, 4, 4)
IDS = {"token_ids": Value("ids", "tokens", 1, "int")}
TABLE = Weight("table", (9, 4))
"""Families whose decoders the native backend runs."""

ROW_TYPES = {"u4": "int8", "u6": "int8", "u8": "int8", "i8": "whole", "bf16": "bf16"}


def row_type_of(code):
    """Returns the row types of a level with a tile unit, where they differ most."""
    return ROW_TYPES.get(code, "fp32")


def program_of(*operations, groups=(), inputs=IDS, output="logits", out=None):
    made = out or operations[-1].outputs[0]
    return Program("test", inputs, {output: made}, operations, groups, made.width)


def unread(weight):
    raise AssertionError(f"{weight.name} was read")


def attention(**changes):
    return replace(ops.Attention(T, U, "kv", 0, 1, 1.0), **changes)


REFUSED = [
    (program_of(rank_ops.AllReduce(X, Y)), "cannot run the op AllReduce on one rank (in test)"),
    (program_of(attention(mask="tree"), groups=(KV,)), "attention with the mask tree"),
    (
        program_of(attention(num_heads=17), groups=(KV,)),
        "more than 16 query heads for one kv head",
    ),
    (
        program_of(attention(), groups=(replace(KV, k_width=1026),)),
        "keys wider than 1024",
    ),
    (
        program_of(ops.KvWrite((K, K), V, "kv", 0), out=Y, groups=(replace(KV, num_kv_heads=2),)),
        "a KV write of several parts for several heads",
    ),
    (
        program_of(ops.KvWrite((K,), None, "kv", 0), out=Y, groups=(KV,)),
        "a KV write without values",
    ),
    (program_of(ops.Scale(X, Y, 2.0), output="states"), "the outputs ['states']"),
    (program_of(ops.Scale(X, Y, 2.0), inputs={"hidden": X}), "the inputs ['hidden']"),
    (program_of(ops.Scale(T, U, 2.0)), "logits over tokens"),
    (program_of(ops.Act(X, Y, "mish")), "the activation mish"),
    (program_of(ops.ActMul(X, X, Y, "mish")), "the activation mish"),
    (
        program_of(ops.Linear(X, (Y,), (TABLE,), gate=ops.Gate("mish"))),
        "the activation mish",
    ),
    (
        program_of(ops.Scale(replace(X, axis="requests"), replace(Y, axis="requests"), 2.0)),
        "logits over requests",
    ),
    (
        program_of(ops.Rope(X, Y, 1, 4, 4, 0, ops.RopeTable((1.0, 0.1)))),
        "the op Rope over samples",
    ),
    (program_of(ops.Embedding(replace(U, axis="samples"), TABLE)), "the op Embedding over samples"),
]


@pytest.mark.parametrize(("program", "message"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_the_kernels_cannot_run_is_refused_by_name(program, message):
    with pytest.raises(BackendUnavailable) as error:
        check(program, lambda weight: "F32", row_type_of)
    assert message in str(error.value)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*NATIVE_FAMILIES}))
def test_a_family_that_it_cannot_run_is_refused_unread(family):
    """Neither `check` nor `prepare_program` reads a weight of a Program that it refuses."""
    require_native()
    checkpoint = open_checkpoint(tiny_model(family).path)
    program = build_programs(checkpoint.config)["decoder"]
    backend = NativeBackend(BackendOptions(num_threads=1))
    for refuse in (
        lambda: backend.check(program, loaded_formats(checkpoint, "auto", None, program)),
        lambda: backend.prepare_program(program, unread),
    ):
        with pytest.raises(BackendUnavailable, match="the native backend cannot run"):
            refuse()


def gated(gate, up):
    weights = (Weight("gate", (4, 4)), Weight("up", (4, 4)))
    op = ops.Linear(X, (Y,), weights, gate=ops.Gate("silu"))
    return program_of(op), {"gate": gate, "up": up}


@pytest.mark.parametrize(
    ("gate", "up"),
    [("F32", "I8"), ("I8", "Q8_0"), ("Q4_0", "BF16"), ("BF16", "F16"), ("I8", "Q4_K")],
)
def test_a_gate_and_up_that_read_other_rows_are_refused(gate, up):
    program, formats = gated(gate, up)
    with pytest.raises(BackendUnavailable, match=rf"gate \({gate}\) and up \({up}\)"):
        check(program, lambda weight: formats[weight.name], row_type_of)


@pytest.mark.parametrize(("gate", "up"), [("F32", "F16"), ("Q4_0", "Q6_K"), ("I8", "I8")])
def test_a_gate_and_up_that_read_the_same_rows_are_taken(gate, up):
    program, formats = gated(gate, up)
    check(program, lambda weight: formats[weight.name], row_type_of)


@pytest.mark.parametrize("stored", ["F8_E5M2", "NF4", "MXFP4", "IQ2_XS"])
def test_a_format_without_tiles_is_refused(stored):
    program = program_of(ops.Linear(X, (Y,), (TABLE,)))
    with pytest.raises(UnsupportedModel) as error:
        check(program, lambda weight: stored, row_type_of)
    assert f"table is stored as {stored}, supported: {', '.join(FORMATS)}" in str(error.value)


CODES = np.zeros((9, 32), np.uint8)
UNPACKABLE = {
    "e5m2 codes of 8 bits": PackedWeight(
        (9, 32), 8, "e5m2", CODES, 32, Levels(np.ones((9, 1), np.float32))
    ),
    "e2m1 codes of 4 bits": PackedWeight(
        (9, 32), 4, "e2m1", CODES[:, :16], 32, Levels(np.ones((9, 1), np.float32))
    ),
}


@pytest.mark.parametrize("what", UNPACKABLE)
def test_preparing_refuses_what_was_not_checked(what):
    """A weight without tiles is the model's fault, also where `prepare_program` is called by
    itself.
    """
    require_native()
    x, y = Value("x", "tokens", 32), Value("y", "samples", 32)
    z = Value("z", "samples", 9)
    program = program_of(
        ops.Embedding(x, Weight("embedding", (9, 32)), IDS["token_ids"]),
        ops.GatherRows(x, y),
        ops.Linear(y, (z,), (Weight("table", (9, 32)),)),
    )
    weights = {
        "embedding": PackedWeight.plain(np.zeros((9, 32), np.float32)),
        "table": UNPACKABLE[what],
    }
    backend = NativeBackend(BackendOptions(max_tokens=4))
    with pytest.raises(UnsupportedModel, match=f"does not support .*{what}"):
        backend.prepare_program(program, lambda weight: weights[weight.name])


def test_a_model_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    require_native()
    in_fp8(tiny_model("llama"), tmp_path, "blocks")
    monkeypatch.setattr(WeightReader, "load", lambda self, weight: unread(weight))
    with pytest.raises(UnsupportedModel, match="is stored as F8_E4M3:16"):
        LLM(str(tmp_path), backend="native", skip_tokenizer_init=True, report=lambda text: None)


@pytest.mark.parametrize("dtype", ["fp8", "fp16", "int2"])
def test_a_kv_dtype_that_kernels_lack_is_refused(dtype):
    with pytest.raises(
        BackendUnavailable, match=f"got {dtype}, the native backend supports auto, fp32, bf16, int8"
    ):
        NativeBackend(BackendOptions(kv_cache_dtype=dtype, num_threads=1))
