"""Rounding to grids: the search against the plain formula, GPTQ against the least squares that it
solves step by step, AWQ's and SmoothQuant's factors, and GGUF's blocks against gguf-py.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.quant.making import gptq, refine
from octavo.quant.making.channels import awq_factors, smooth_factors
from octavo.quant.making.gguf_blocks import BY_NAME, TYPES, block_bytes, fit_blocks, type_for
from octavo.quant.making.gptq import GptqInputs, fitted, nearest
from octavo.quant.making.grid import GridKind, GridSpec, RoundedMatrix

RNG = np.random.default_rng(3)
WEIGHT = (RNG.standard_normal((24, 96)) * 0.05).astype(np.float32)
MIX = RNG.standard_normal((96, 96)) * 0.3 + np.diag(np.exp(RNG.standard_normal(96)))
ROWS = RNG.standard_normal((400, 96)) @ MIX
HESSIAN = ROWS.T @ ROWS
KINDS: list[GridKind] = ["middle", "zero", "min"]


def cost(matrix: RoundedMatrix) -> float:
    """Returns the squared error of the products with the calibration rows."""
    return float(np.square(ROWS @ (matrix.values() - WEIGHT).T).sum())


def less_by_chance(hessian: np.ndarray) -> np.ndarray:
    """Returns a Hessian as GPTQ takes it: products of two inputs count less than squares."""
    diagonal = np.diag(hessian.diagonal())
    return diagonal + (hessian - diagonal) * (1 - gptq.CHANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_search_is_no_worse_than_whole_ranges(kind: GridKind, bits: int) -> None:
    spec = GridSpec(bits, 32, kind)
    plain, found = (nearest(WEIGHT, None, fitted(spec, searches=on)) for on in (False, True))
    errors = [np.square(each.values() - WEIGHT).sum() for each in (plain, found)]
    assert errors[1] <= errors[0] * 1.0001
    step = np.repeat(plain.grid.lines()[0], 32, axis=1)
    inside = np.abs(plain.values() - WEIGHT) <= 1.01 * step
    assert inside.all()


def test_what_goes_together_by_chance_is_not_fitted() -> None:
    """Calibrated on few rows, less error is left on others where products count less."""
    rows, others = ROWS[:80], ROWS[80:]
    spec = GridSpec(3, 32, "zero")
    errors = []
    for chance in (0.0, gptq.CHANCE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gptq, "CHANCE", chance)
            made = GptqInputs(rows.T @ rows, 1.0).by_activity(WEIGHT, spec)
        errors.append(np.square(others @ (made.values() - WEIGHT).T).sum())
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_group_may_be_shorter(kind: GridKind) -> None:
    matrix = nearest(WEIGHT, None, fitted(GridSpec(8, 40, kind)))
    assert np.abs(matrix.values() - WEIGHT).max() < 0.01


@pytest.mark.parametrize("damp_percent", [1.0, 10.0])
def test_gptq_solves_least_squares_for_what_is_left(
    damp_percent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each input is the nearest code to what is optimal given the codes before it."""
    monkeypatch.setattr(refine, "SWEEPS", 0)
    spec = GridSpec(4, 32, "zero")
    found = GptqInputs(HESSIAN, damp_percent).round_by_groups(WEIGHT, fitted(spec))
    steps, lows = (np.repeat(each, 32, axis=1) for each in found.grid.lines())
    damped = less_by_chance(HESSIAN)
    damped += np.eye(96) * HESSIAN.diagonal().mean() * damp_percent / 100
    order = np.argsort(-HESSIAN.diagonal(), kind="stable")
    values = found.values().astype(np.float64)
    for at in range(0, 96, 7):
        fixed, free = order[:at], order[at:]
        moved = (values - WEIGHT)[:, fixed] @ damped[np.ix_(fixed, free)]
        optimum = WEIGHT[:, free] - moved @ np.linalg.inv(damped[np.ix_(free, free)])
        wanted = (optimum[:, 0] - lows[:, free[0]]) / steps[:, free[0]]
        clipped = np.clip(wanted, 0, 15)
        assert np.abs(found.codes[:, free[0]] - clipped).max() < 0.502


def test_a_matrix_makes_up_for_inputs_that_moved() -> None:
    """Its products with the moved inputs are nearest to those of the matrix with the exact ones,
    damping aside.
    """
    moved = ROWS + np.random.default_rng(4).standard_normal(ROWS.shape) * 0.2
    hessian, shift = moved.T @ moved, (ROWS - moved).T @ moved
    found = GptqInputs(hessian, 1.0, shift).compensate(WEIGHT).astype(np.float64)
    damped = less_by_chance(hessian) + np.eye(96) * hessian.diagonal().mean() / 100
    wanted = WEIGHT + WEIGHT @ shift @ np.linalg.inv(damped)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(WEIGHT).max())
    errors = [np.square(moved @ each.T - ROWS @ WEIGHT.T).sum() for each in (found, WEIGHT)]
    assert errors[0] < errors[1]
    spec, inputs = GridSpec(4, 32, "zero"), GptqInputs(hessian, 1.0, shift)
    made = [inputs.by_activity(each, spec) for each in (inputs.compensate(WEIGHT), WEIGHT)]
    errors = [np.square(moved @ each.values().T - ROWS @ WEIGHT.T).sum() for each in made]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("bits", [3, 4])
def test_a_matrix_makes_up_for_errors_of_what_its_products_are_added_to(bits: int) -> None:
    """The sums come nearest to the exact ones, damping aside, where half of an error's square
    follows from the inputs and half is chance.
    """
    generator = np.random.default_rng(5)
    moved = ROWS + generator.standard_normal(ROWS.shape) * 0.2
    made_by_inputs = moved @ generator.standard_normal(WEIGHT.T.shape) * 0.01
    missed = made_by_inputs + generator.standard_normal(made_by_inputs.shape) * made_by_inputs.std()
    hessian, shift = moved.T @ moved, (ROWS - moved).T @ moved
    inputs = GptqInputs(hessian, 1.0, shift)
    found = inputs.compensate(WEIGHT, missed.T @ moved)
    damped = less_by_chance(hessian) + np.eye(96) * hessian.diagonal().mean() / 100
    wanted = WEIGHT + (WEIGHT @ shift + missed.T @ moved) @ np.linalg.inv(damped)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(WEIGHT).max())
    errors = []
    for each in (found, inputs.compensate(WEIGHT)):
        values = inputs.by_activity(each, GridSpec(bits, 32, "zero")).values()
        errors.append(np.square(missed + ROWS @ WEIGHT.T - moved @ values.T).sum())
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("kind", KINDS)
def test_gptq_costs_less_than_rounding(kind: GridKind) -> None:
    spec = GridSpec(4, 32, kind)
    inputs = GptqInputs(HESSIAN, 1.0)
    rounded = cost(nearest(WEIGHT, inputs.importance, fitted(spec)))
    assert cost(inputs.round_by_groups(WEIGHT, fitted(spec))) < 0.6 * rounded
    if kind != "min":
        matrix = inputs.by_activity(WEIGHT, spec)
        assert cost(matrix) < 0.6 * rounded
        assert matrix.permutation is not None
        assert (np.diff(HESSIAN.diagonal()[matrix.permutation]) <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_refined(kind: GridKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less error is left with each sweep, and at the end no code wishes to be another."""
    monkeypatch.setattr(gptq, "CHANCE", 0)
    spec, damped = GridSpec(3, 32, kind), 1e-6
    costs = []
    for sweeps in (0, 1, 30):
        monkeypatch.setattr(refine, "SWEEPS", sweeps)
        found = GptqInputs(HESSIAN, damped).round_by_groups(WEIGHT, fitted(spec))
        costs.append(cost(found))
    assert costs[2] <= costs[1] < costs[0]
    steps = np.repeat(found.grid.lines()[0], 32, axis=1)
    slopes = (found.values() - WEIGHT) @ HESSIAN
    wish = found.codes - slopes / HESSIAN.diagonal() / steps
    assert (np.rint(np.clip(wish, 0, 7)) != found.codes).mean() < 0.002
    if kind != "min":
        scales = found.grid.scales.values
        assert scales.dtype == np.float16 and (scales > 0).all()


def test_inputs_that_are_never_used_are_rounded_to_nearest() -> None:
    hessian = HESSIAN.copy()
    hessian[5], hessian[:, 5] = 0, 0
    matrix = GptqInputs(hessian, 1.0).round_by_groups(WEIGHT, fitted(GridSpec(8, 32, "min")))
    assert np.abs(matrix.values() - WEIGHT)[:, 5].max() < 0.002


def test_a_hessian_of_few_rows_is_damped_until_it_can_be_solved() -> None:
    rows = ROWS[:3]
    matrix = GptqInputs(rows.T @ rows, 0.001).round_by_groups(
        WEIGHT, fitted(GridSpec(4, 32, "zero"))
    )
    assert np.isfinite(matrix.values()).all()


def test_awq_factors_leave_less_error() -> None:
    quick = fitted(GridSpec(4, 32, "zero"), searches=False)
    strength = np.abs(ROWS).mean(axis=0).astype(np.float32)
    factors = awq_factors([WEIGHT], HESSIAN, strength, quick)
    scaled = nearest(WEIGHT * factors, None, quick)
    error = np.square(ROWS @ (scaled.values() / factors - WEIGHT).T).sum()
    assert error < cost(nearest(WEIGHT, None, quick))


def test_smooth_factors_share_the_range() -> None:
    largest = np.abs(ROWS).max(axis=0).astype(np.float32)
    factors = smooth_factors([WEIGHT[:8], WEIGHT[8:]], largest)
    np.testing.assert_allclose(largest / factors, np.abs(WEIGHT * factors).max(axis=0), rtol=1e-4)


@pytest.mark.parametrize("name", sorted({name for pair in TYPES.values() for name in pair}))
def test_blocks_are_read_as_they_were_meant(name: str) -> None:
    """The reader of gguf-py and the engine's own read the bytes, bit for bit."""
    weight = (np.random.default_rng(7).standard_normal((6, 512)) * 0.1).astype(np.float32)
    weight[0] = 0
    weight[1] = np.abs(weight[1]) + 1
    weight[2] = -np.abs(weight[2]) - 1
    kind = BY_NAME[name][1]
    matrix = nearest(weight, None, lambda rows, shares: fit_blocks(rows, shares, kind))
    data = block_bytes(matrix, kind)
    meant = matrix.values()
    np.testing.assert_array_equal(
        gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]), meant
    )
    np.testing.assert_array_equal(kind.tensor(data.reshape(-1), weight.shape).dequantize(), meant)
    assert np.abs(meant[3:] - weight[3:]).max() < 0.06


def test_types_by_width() -> None:
    assert [type_for(width, 4, symmetric=False) for width in (512, 96, 40)] == [
        BY_NAME["Q4_K"][1],
        BY_NAME["Q4_1"][1],
        None,
    ]
