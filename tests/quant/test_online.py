"""Packing at load: error bounds, exactness where the input is already on such a grid, odd
shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.errors import UnsupportedModel
from octavo.quant.online import pack_fp8, pack_int4, pack_int8, pack_int8_groups
from octavo.quant.packed import Levels, PackedWeight
from tests.support.tiers import examples


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def relative_error(packed: PackedWeight, weight: np.ndarray) -> float:
    return float(np.sqrt(np.square(packed.dequantize() - weight).mean()) / weight.std())


@pytest.mark.parametrize(
    ("pack", "bound"), [(pack_int8, 0.008), (pack_fp8, 0.03), (pack_int4, 0.085)]
)
@pytest.mark.parametrize("shape", [(1, 32), (300, 576), (4, 7, 96)], ids=str)
def test_error_of_normal_weights(pack, bound: float, shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    packed = pack(weight)
    assert packed.shape == shape
    assert relative_error(packed, weight) < bound


def test_int8_has_one_scale_an_output_and_keeps_zeros() -> None:
    weight = normal(5, 40)
    weight[2] = 0
    packed = pack_int8(weight)
    assert packed.scales is not None and packed.scales.values.shape == (5, 1)
    assert relative_error(packed, weight) < 0.008
    assert not packed.dequantize()[2].any()
    assert packed.codes.min() >= -127


def test_fp8_has_one_scale_an_output_and_keeps_zeros_and_what_is_damaged() -> None:
    weight = normal(5, 40)
    weight[2], weight[3, 1] = 0, np.nan
    packed = pack_fp8(weight)
    assert (
        packed.scales is not None
        and packed.scales.values.shape == (5, 1)
        and packed.codes.dtype.name == "float8_e4m3fn"
    )
    assert (packed.code, packed.activation, packed.num_bytes) == ("e4m3", "per_token", 5 * 44)
    assert not packed.dequantize()[2].any() and np.isnan(packed.dequantize()[3]).any()
    np.testing.assert_allclose(
        packed.dequantize()[[0, 1, 4]],
        weight[[0, 1, 4]],
        rtol=1 / 16,
        atol=1e-3 * abs(weight[[0, 1, 4]]).max(),
    )


def test_fp8_of_an_fp8_grid_is_exact() -> None:
    """Packing dequantised fp8 codes with a scale for each output gives the same again."""
    packed = pack_fp8(normal(6, 64))
    np.testing.assert_array_equal(
        pack_fp8(packed.dequantize()).codes.view(np.uint8), packed.codes.view(np.uint8)
    )


def test_int4_refuses_short_groups() -> None:
    with pytest.raises(
        UnsupportedModel, match="int4: a matrix has 40 inputs, expected a multiple of 32"
    ):
        pack_int4(normal(5, 40))


def test_int4_keeps_constant_groups() -> None:
    weight = np.full((2, 64), 0.25, np.float32)
    weight[1] = 0
    np.testing.assert_array_equal(pack_int4(weight).dequantize(), weight)


def test_int4_of_a_q4_1_grid_is_nearly_exact() -> None:
    """Packing a dequantised Q4_1 weight loses nothing but the fp16 rounding of the scale."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (8, 96), dtype=np.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = rng.uniform(0.01, 0.02, (8, 3)).astype(np.float16)
    origin = PackedWeight(
        (8, 96), 8, "uint", codes, 32, Levels(scales), Levels(-scales * np.float16(7))
    )
    np.testing.assert_allclose(
        pack_int4(origin.dequantize()).dequantize(), origin.dequantize(), atol=2e-4
    )


def test_int4_errs_where_inputs_are_weak() -> None:
    """Scaling the importance of a whole group changes nothing: only shares within a group count."""
    weight, importance = (
        normal(200, 128),
        np.exp2(np.random.default_rng(3).integers(-8, 3, 128)).astype(np.float32),
    )
    packed, plain = pack_int4(weight, importance), pack_int4(weight)
    errors = [
        (importance * np.square(each.dequantize() - weight)).sum() for each in (packed, plain)
    ]
    assert errors[0] < 0.8 * errors[1]
    again = pack_int4(weight, importance * np.repeat([0.25, 1, 2, 64], 32).astype(np.float32))
    np.testing.assert_array_equal(again.dequantize(), packed.dequantize())
    same = pack_int4(weight, np.ones(128, np.float32))
    np.testing.assert_array_equal(same.dequantize(), plain.dequantize())


def test_int4_with_one_input_that_matters() -> None:
    """Inputs a million times weaker than one in their group are still packed in sensible steps."""
    weight, importance = normal(50, 32), np.full(32, 1e-6, np.float32)
    importance[5] = 1
    packed = pack_int4(weight, importance).dequantize()
    assert (
        abs(packed - weight)[:, 5].max() < 0.01
        and relative_error(pack_int4(weight, importance), weight) < 0.15
    )


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-6, 1e3))
def test_int4_is_never_worse_than_the_plain_grid(seed: int, spread: float) -> None:
    """The error is never larger than that of codes from a group's min and max alone.

    The tolerance is what rounding scale and min to fp16 costs: thousandths of the error, or where
    they are subnormal half a step of 2^-24 for each of 15 codes and for the min.
    """
    weight = (np.random.default_rng(seed).standard_t(3, (4, 32)) * spread).astype(np.float32)
    low, high = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float32)
    start = low.astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    plain = np.clip(np.rint((weight - start) * inverse), 0, 15) * scale + start
    error = np.square(pack_int4(weight).dequantize() - weight).sum(1)
    rounding = 16 * 2.0**-25 * 32**0.5 if spread < 1e-3 else 0.0
    assert (
        np.sqrt(error) <= np.sqrt(np.square(plain - weight).sum(1) * 1.01 + 1e-12) + rounding
    ).all()


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damaged_weights_stay_damaged(damage: float) -> None:
    """Damaged weights become NaN, which fails the requests that meet them, instead of zeros that go
    unseen; the groups and rows beside them are not touched.
    """
    weight = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    sound4, sound8 = pack_int4(weight).dequantize(), pack_int8(weight).dequantize()
    weight[1, 5] = damage
    with np.errstate(invalid="ignore"):
        made4, made8 = pack_int4(weight).dequantize(), pack_int8(weight).dequantize()
    assert not np.isfinite(made4[1, :32]).any() and not np.isfinite(made8[1]).any()
    np.testing.assert_array_equal(
        np.delete(made4.reshape(8, 32), 2, axis=0), np.delete(sound4.reshape(8, 32), 2, axis=0)
    )
    np.testing.assert_array_equal(np.delete(made8, 1, axis=0), np.delete(sound8, 1, axis=0))


def test_rows_of_a_quantised_vector() -> None:
    """A bias may be quantised in a file: its rows lie in groups, and are kept as floats."""
    packed = pack_int4(normal(64))
    order = np.arange(64)[::-1]
    np.testing.assert_array_equal(packed.rows(order).dequantize(), packed.dequantize()[order])


def test_int8_groups_are_as_near_as_their_own_steps():
    weight = np.random.default_rng(2).normal(size=(3, 5, 96)).astype(np.float32)
    weight[1, 2, 32:64] = 0
    packed = pack_int8_groups(weight)
    groups = weight.reshape(3, 5, 3, 32)
    steps = abs(groups).max(axis=-1, keepdims=True) / 127
    error = abs(packed.dequantize().reshape(groups.shape) - groups)
    assert (error <= 0.5 * steps + 127 * steps * 2.0**-11).all(), "a step, and the scale's rounding"
    assert packed.group == 32 and packed.activation == "per_group"
