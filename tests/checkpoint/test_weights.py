"""WeightReader: sources, transposing, cutting, precision, packing, and shapes that do not fit."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.ports import StoredTensor
from octavo.checkpoint.weights import Quantization, WeightReader, packing_plan
from octavo.models.registry import build_programs
from octavo.program.expert_ops import GroupedLinear, Route
from octavo.program.ops import Embedding, Linear
from octavo.program.program import Program, Value, Weight
from octavo.quant.online import pack_int4
from octavo.quant.packed import PackedWeight
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_encoders import encoder_config
from tests.support.tiny_models import tiny_model


class Memory:
    """A checkpoint of arrays in memory."""

    path = Path("memory")
    output_major = False

    def __init__(self, **tensors: np.ndarray | PackedWeight) -> None:
        self.tensors = {
            name: t if isinstance(t, PackedWeight) else PackedWeight.plain(t)
            for name, t in tensors.items()
        }

    def tensor(self, name: str) -> PackedWeight:
        return self.tensors[name]

    def stored(self, name: str) -> StoredTensor:
        held = self.tensors[name]
        return StoredTensor(name, held.shape, self.path, is_quantized=not held.is_float)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_stacks_and_transposes_sources() -> None:
    parts = [numbers(6, 4) + i for i in range(3)]
    checkpoint = Memory(**{f"e{i}": part for i, part in enumerate(parts)})
    loaded = WeightReader(checkpoint).load(
        Weight("w", (3, 4, 6), sources=("e0", "e1", "e2"), transposed=True)
    )
    np.testing.assert_array_equal(loaded.codes, np.stack([part.T for part in parts]))
    checkpoint.output_major = True
    np.testing.assert_array_equal(
        WeightReader(checkpoint)
        .load(Weight("w", (3, 6, 4), ("e0", "e1", "e2"), transposed=True))
        .codes,
        np.stack(parts),
    )


def test_stacks_quantised_sources() -> None:
    parts = [pack_int4(numbers(5, 64) + i) for i in range(2)]
    loaded = WeightReader(Memory(a=parts[0], b=parts[1])).load(
        Weight("w", (2, 5, 64), sources=("a", "b"))
    )
    np.testing.assert_array_equal(
        loaded.dequantize(), np.stack([part.dequantize() for part in parts])
    )
    with pytest.raises(WeightMismatch, match="differ in shape or format"):
        WeightReader(Memory(a=parts[0], b=numbers(5, 64))).load(
            Weight("w", (2, 5, 64), sources=("a", "b"))
        )


@pytest.mark.parametrize(
    ("stored", "wanted", "rows_last", "expected"),
    [
        ((8, 5), (4, 5), False, lambda a: a[1::2]),
        ((3, 8, 5), (3, 4, 5), False, lambda a: a[:, 1::2]),
        ((3, 8), (3, 4), True, lambda a: a[:, 1::2]),
        ((8,), (4,), False, lambda a: a[1::2]),
    ],
    ids=["matrix", "experts", "expert biases", "bias"],
)
def test_interleaved_rows(
    stored: tuple[int, ...], wanted: tuple[int, ...], rows_last: bool, expected
) -> None:
    array = numbers(*stored)
    loaded = WeightReader(Memory(w=array)).load(
        Weight("w", wanted, source_rows=8, row_start=1, row_step=2, rows_last=rows_last)
    )
    np.testing.assert_array_equal(loaded.codes, expected(array))


def test_a_slice_of_a_merged_matrix() -> None:
    array = numbers(12, 5)
    loaded = WeightReader(Memory(qkv=array)).load(
        Weight("k", (4, 5), sources=("qkv",), source_rows=12, row_start=4)
    )
    np.testing.assert_array_equal(loaded.codes, array[4:8])


def test_runs_of_rows() -> None:
    """A cut may take each head's first two of three rows."""
    array = numbers(6, 5)
    loaded = WeightReader(Memory(w=array)).load(
        Weight("nope", (4, 5), ("w",), source_rows=6, row_step=3, row_run=2)
    )
    np.testing.assert_array_equal(loaded.codes, array[[0, 1, 3, 4]])


def test_wrong_shapes_say_both() -> None:
    with pytest.raises(WeightMismatch, match=r"w has shape \(3, 4\), expected \(4, 3\)"):
        WeightReader(Memory(w=numbers(3, 4))).load(Weight("w", (4, 3)))


def test_dtype() -> None:
    quantised, vector = pack_int4(numbers(3, 32)), numbers(32).astype(np.float16)
    checkpoint = Memory(q=quantised, h=numbers(3, 32).astype(np.float16), v=vector)
    auto, wide, half = (
        WeightReader(checkpoint, dtype) for dtype in ("auto", "float32", "bfloat16")
    )
    assert auto.load(Weight("q", (3, 32))) is quantised
    np.testing.assert_array_equal(wide.load(Weight("q", (3, 32))).codes, quantised.dequantize())
    np.testing.assert_array_equal(
        half.load(Weight("q", (3, 32))).codes, quantised.dequantize().astype(ml_dtypes.bfloat16)
    )
    assert [reader.load(Weight("h", (3, 32))).code for reader in (auto, wide, half)] == [
        "fp16",
        "fp32",
        "bf16",
    ]
    assert half.load(Weight("v", (32,))).code == "fp16"


def moe_program() -> Program:
    ids, x, y = Value("ids", "tokens", 1, "int"), Value("x", "tokens", 64), Value("y", "tokens", 64)
    position, logits = Value("p", "tokens", 64), Value("logits", "tokens", 2)
    routed = (
        Value("rows", "expert_rows", 64),
        Value("chosen", "tokens", 1, "int"),
        Value("shares", "tokens", 1),
    )
    ops = (
        Embedding(x, Weight("embed", (9, 64)), ids),
        Embedding(position, Weight("wpe", (9, 64)), by_position=True),
        Linear(x, (y,), (Weight("proj", (64, 64)),), (Weight("bias", (64,)),)),
        Linear(y, (logits,), (Weight("router", (2, 64)),)),
        Route(y, logits, routed, num_experts=2, top_k=1),
        GroupedLinear(
            routed[0],
            routed[1],
            Value("z", "expert_rows", 64),
            Weight("experts", (2, 64, 64)),
            Weight("eb", (2, 64)),
        ),
        Linear(y, (Value("out", "tokens", 9),), (Weight("embed", (9, 64)),)),
    )
    return Program("decoder", {"token_ids": ids}, {}, ops)


def test_an_encoder_keeps_tables_and_values_and_packs_the_rest_in_groups() -> None:
    program = build_programs(encoder_config("bert") | {"hidden_size": 64})["encoder"]
    plan = {weight.name: how for weight, how in packing_plan(program, "int8").items()}
    layer = "encoder.layer.0"
    assert plan[f"{layer}.attention.self.query.weight"] == "int8_groups"
    assert plan[f"{layer}.output.dense.weight"] == "int8", "90 inputs are no whole groups"
    assert f"{layer}.attention.self.value.weight" not in plan
    assert not any("embeddings" in name for name in plan)


def test_packing_plan() -> None:
    program = moe_program()
    assert by_name(program, "int4") == {"embed": "int8", "proj": "int4", "experts": "int4"}
    assert by_name(program, "int8") == {"embed": "int8", "proj": "int8", "experts": "int8"}
    assert by_name(program, "fp8") == {"proj": "fp8", "experts": "fp8"}
    tensors = {weight.name: numbers(*weight.shape) for weight in program.weights}
    for quantization, bits in (("int8", 8), ("int4", 4)):
        reader = WeightReader(Memory(**tensors), quantization=quantization, program=program)
        loaded = {weight.name: reader.load(weight).bits for weight in program.weights}
        assert loaded == {
            "embed": 8,
            "wpe": 32,
            "proj": bits,
            "bias": 32,
            "router": 32,
            "experts": bits,
            "eb": 32,
        }


def by_name(program: Program, quantization: Quantization) -> dict[str, str]:
    return {weight.name: bits for weight, bits in packing_plan(program, quantization).items()}


@pytest.mark.parametrize("tied", [True, False])
def test_with_fp8_what_stands_at_the_ends_stays(tied: bool) -> None:
    config = tiny_model("gemma3_text").config | {
        "tie_word_embeddings": tied,
        "final_logit_softcapping": 3.0,
    }
    program = build_programs(config)["decoder"]
    rest = {
        weight.name for op in program.ops if isinstance(op, Linear) for weight in op.weights_
    } - {
        "lm_head.weight",
        "model.embed_tokens.weight",
    }
    assert by_name(program, "fp8") == dict.fromkeys(rest, "fp8")


def test_with_int4_values_and_half_of_down_keep_eight_bits() -> None:
    config = tiny_model("llama", **WIDTHS_OF_32["llama"]).config | {"num_hidden_layers": 24}
    plan = by_name(build_programs(config)["decoder"], "int4")
    kept = {name for name, bits in plan.items() if bits == "int8"}
    downs = (0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23)
    values = {f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(24)}
    assert kept - {"model.embed_tokens.weight"} == values | {
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in downs
    }


def test_values_cut_from_a_merged_tensor_keep_eight_bits() -> None:
    """Values cut from a merged tensor keep 8 bits; GPT-2's q, k and v are three weights of one
    name.
    """
    program = build_programs(tiny_model("gpt2", **WIDTHS_OF_32["gpt2"]).config)["decoder"]
    plan = packing_plan(program, "int4")
    merged = [
        plan[weight]
        for weight in program.weights
        if weight.name == "transformer.h.0.attn.c_attn.weight"
    ]
    assert merged == ["int4", "int4", "int8"]


def test_what_int4_cannot_pack_is_refused_before_anything_is_read() -> None:
    program = build_programs(tiny_model("llama").config)["decoder"]
    message = r"int4: model.layers.0.mlp.down_proj.weight has 100 inputs, expected a multiple of 32"
    with pytest.raises(UnsupportedModel, match=message):
        packing_plan(program, "int4")
    with pytest.raises(UnsupportedModel, match=message):
        WeightReader(Memory(), quantization="int4", program=program)
    assert set(packing_plan(program, "int8").values()) == {"int8"}


# -- a rank's part ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "stored", "expected"),
    [
        (Weight("w", (8, 6)).part(rows=(2, 5)), (8, 6), lambda a: a[2:5]),
        (Weight("w", (8, 6)).part(inputs=(3, 6)), (8, 6), lambda a: a[:, 3:]),
        (Weight("w", (8,)).part(rows=(4, 8)), (8,), lambda a: a[4:]),
        (
            Weight("w", (4, 6), source_rows=12, row_start=4).part(rows=(1, 3)),
            (12, 6),
            lambda a: a[5:7],
        ),
        (Weight("w", (2, 4, 6)).part(rows=(0, 2)), (2, 4, 6), lambda a: a[:, :2]),
        (Weight("w", (2, 4), rows_last=True).part(rows=(2, 4)), (2, 4), lambda a: a[:, 2:]),
    ],
    ids=["rows", "inputs", "vector", "rows of a slice", "experts", "experts' biases"],
)
def test_a_part_is_a_view_of_what_is_stored(
    weight: Weight, stored: tuple[int, ...], expected
) -> None:
    """A part of a weight is a view, so that nothing else of a mapped file is read."""
    array = numbers(*stored)
    loaded = WeightReader(Memory(w=array)).load(weight)
    np.testing.assert_array_equal(loaded.codes, expected(array))
    assert loaded.shape == weight.shape and np.shares_memory(loaded.codes, array)


def test_a_part_of_strided_rows_and_of_a_transposed_tensor() -> None:
    array = numbers(6, 16)
    every_second = Weight("w", (8, 6), transposed=True, source_rows=16, row_start=1, row_step=2)
    loaded = WeightReader(Memory(w=array)).load(every_second.part(rows=(4, 8)))
    np.testing.assert_array_equal(loaded.codes, array.T[1::2][4:])
    loaded = WeightReader(Memory(w=array)).load(
        Weight("w", (16, 6), transposed=True).part(inputs=(2, 4))
    )
    np.testing.assert_array_equal(loaded.codes, array.T[:, 2:4])
    assert loaded.codes.flags.c_contiguous


def test_a_part_of_stacked_sources() -> None:
    parts = [numbers(8, 6) + i for i in range(2)]
    loaded = WeightReader(Memory(a=parts[0], b=parts[1])).load(
        Weight("w", (2, 8, 6), ("a", "b")).part(rows=(1, 4))
    )
    np.testing.assert_array_equal(loaded.codes, np.stack(parts)[:, 1:4])


def test_a_part_of_another_shape_is_refused() -> None:
    with pytest.raises(WeightMismatch, match=r"w has shape \(8, 6\), expected 9 rows"):
        WeightReader(Memory(w=numbers(8, 6))).load(Weight("w", (9, 6)).part(rows=(0, 3)))
    with pytest.raises(WeightMismatch, match=r"w has shape \(8, 6\), expected 7 inputs"):
        WeightReader(Memory(w=numbers(8, 6))).load(Weight("w", (8, 7)).part(inputs=(0, 3)))


def test_a_group_of_inputs_is_not_cut() -> None:
    with pytest.raises(
        UnsupportedModel, match="w: inputs 16 to 64 cannot be cut from a weight of groups of 32"
    ) as refused:
        WeightReader(Memory(w=pack_int4(numbers(5, 64)))).load(
            Weight("w", (5, 64)).part(inputs=(16, 64))
        )
    assert "--dtype bfloat16" in refused.value.hint
