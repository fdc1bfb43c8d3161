"""Triton's norms and gates, in its interpreter, against plain torch: within an ulp of the dtype,
and each row bitwise the same alone.
"""

import pytest
import torch

from octavo.executor.torch.plain import Norm, PlainKernels
from octavo.executor.torch.triton import act_mul, combine, norm
from octavo.executor.torch.triton.kernels import TritonKernels
from octavo.program import ops
from tests.executor.torch.triton.device import DEVICE

PLAIN, TRITON = PlainKernels(), TritonKernels(DEVICE)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 64, 257]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(
        DEVICE, dtype
    )


def assert_close(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    ulp = torch.finfo(wanted.dtype).eps if wanted.dtype != torch.float32 else 2e-6
    torch.testing.assert_close(found, wanted, rtol=2 * ulp, atol=5e-6)


def norms(width):
    yield "rms", Norm(drawn(width), 1e-5)
    yield "rms, 1 + weight", Norm(drawn(width), 1e-6, offset=1.0)
    yield "layer", Norm(drawn(width), 1e-5, bias=drawn(width, seed=1), centered=True)
    yield "layer without bias", Norm(drawn(width), 1e-5, centered=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [name for name, _ in norms(1)])
def test_norms_and_sums(kind, width, dtype):
    a, b, how = (
        drawn(7, width, dtype=dtype),
        drawn(7, width, dtype=dtype, seed=2),
        dict(norms(width))[kind],
    )
    assert_close(norm.norm_rows(a, how), PLAIN.norm(a, how))
    total, normed = norm.add_norm_rows(a, b, how)
    wanted_total, wanted = PLAIN.add_norm(a, b, how)
    assert torch.equal(total, wanted_total)
    assert_close(normed, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "width"), [(1, 32), (3, 24), (4, 128)])
def test_norms_of_heads_in_a_slice(groups, width, dtype):
    """Norms of a slice take rows at the stride of the whole merged product."""
    x = drawn(5, groups * width + 40, dtype=dtype)[:, 16 : 16 + groups * width]
    how = Norm(drawn(width), 1e-6, offset=1.0, width=width)
    assert_close(norm.norm_rows(x, how), PLAIN.norm(x, how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 1500])
@pytest.mark.parametrize("clamp", [None, 0.7])
@pytest.mark.parametrize("activation", act_mul.ACTIVATIONS)
def test_gates(activation, clamp, width, dtype):
    y = 3 * drawn(3, 2 * width + 3, dtype=dtype)
    gate, up = y[:, :width], y[:, width : 2 * width]
    alpha, offset = (1.702, 1.0) if clamp else (1.0, 0.0)
    how = ops.Gate(activation, clamp, alpha, offset)
    assert act_mul.supports(gate, up, how)
    assert_close(act_mul.act_mul(gate, up, how), PLAIN.gated(gate, up, how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "width"), [(1, 5), (2, 64), (7, 1100)])
def test_experts_rows_summed(num, width, dtype):
    x, weights = drawn(3 * num, width, dtype=dtype), drawn(3, num).softmax(dim=-1)
    assert combine.supports(x, weights)
    assert_close(combine.combine_rows(x, weights), PLAIN.combined(x, weights))
    x[num:] = torch.nan
    assert torch.equal(TRITON.combined(x, weights)[0], TRITON.combined(x[:num], weights[:1])[0])
    assert not combine.supports(x, weights.double()) and TRITON.combined(
        x[:0], weights[:0]
    ).shape == (0, width)


def test_what_a_row_is_does_not_depend_on_the_others():
    """A row is bitwise the same beside rows of NaN and infinities, and a NaN stays one."""
    x, how, gate = drawn(6, 96), Norm(drawn(48), 1e-5, width=48), ops.Gate("silu", 7.0, 1.702, 1.0)
    x[1], x[3], x[4, 7] = torch.nan, torch.inf, torch.nan
    for make in (
        lambda x: TRITON.norm(x, how),
        lambda x: TRITON.add_norm(x, x, Norm(how.weight.repeat(2), 1e-5))[1],
    ):
        whole = make(x)
        assert whole[1].isnan().all() and whole[4].isnan().any()
        for row in (0, 2, 5):
            assert (
                torch.equal(make(x[row : row + 1])[0], whole[row]) and whole[row].isfinite().all()
            )
    whole = TRITON.gated(x[:, :48], x[:, 48:], gate)
    assert whole[1].isnan().all() and whole[4, 7].isnan() and whole[4].isnan().sum() == 1
    assert torch.equal(TRITON.gated(x[2:3, :48], x[2:3, 48:], gate)[0], whole[2])


def test_no_rows():
    x = drawn(0, 64)
    assert TRITON.norm(x, Norm(drawn(64), 1e-5)).shape == (0, 64)
    assert TRITON.gated(x, x, ops.Gate("silu")).shape == (0, 64)


def test_what_the_kernels_do_not_carry_is_computed_plainly():
    x, turned = drawn(4, 8), drawn(8, 4).T
    how, tanh = Norm(drawn(8), 1e-5), ops.Gate("tanh")
    assert (
        not norm.supports(turned, how)
        and not act_mul.supports(x, x, tanh)
        and not act_mul.supports(x, turned, ops.Gate("silu"))
    )
    assert torch.equal(TRITON.norm(turned, how), PLAIN.norm(turned, how))
    assert torch.equal(TRITON.add_norm(x, turned, how)[1], PLAIN.add_norm(x, turned, how)[1])
    assert torch.equal(TRITON.gated(x, x, tanh), PLAIN.gated(x, x, tanh))
    wide = torch.zeros(1, norm.WIDEST + 1, device=DEVICE)
    assert not norm.supports(wide, Norm(wide[0], 1e-5)) and norm.supports(
        wide, Norm(wide[0, :8], 1e-5, width=8)
    )
