"""Rope and KV write as one kernel leave the bytes of the separate ops: bit for bit in the
interpreter, within a rounding of the step's dtype on a GPU, which fuses a product and a sum. And
which ops become one.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch

from octavo.executor.torch.kv_cache import CODES, KvTensor
from octavo.executor.torch.rope_write import RopeWrite, RopeWriteCall, with_rope_writes
from octavo.executor.torch.triton.attention import TritonAttention
from octavo.program import ops
from octavo.program.program import Value
from tests.executor.torch.triton.attention_case import DEVICE

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

TABLE = ops.RopeTable((1.0, 0.5))
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    width: int = 24
    v_width: int = 24
    rotary_dim: int = 24
    rotary_start: int = 0
    style: str = "half"
    dtype: torch.dtype = torch.float32
    kv: torch.dtype = torch.float32
    rows: int = 9

    @cached_property
    def numbers(self) -> dict[str, torch.Tensor]:
        """Returns rows as parts of one array, as a merged product makes them; the last row is NaN
        and has no slot.
        """
        generator = torch.Generator().manual_seed(0)
        widths = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.v_width]
        rows = torch.randn((self.rows, sum(widths)), generator=generator)
        rows[-1] = torch.nan
        q, k, v = torch.split(rows.to(self.dtype).to(DEVICE), widths, dim=1)
        angles = (
            torch.randn((self.rows, self.rotary_dim // 2), generator=generator, dtype=torch.float64)
            * 7
        )
        slots = torch.randperm(48, generator=generator)[: self.rows]
        slots[-1] = -1
        heads = {"q": (q, self.heads), "k": (k, self.kv_heads), "v": (v, self.kv_heads)}
        made = {name: part.view(self.rows, count, -1) for name, (part, count) in heads.items()}
        return made | {
            "cos": angles.cos().float().to(DEVICE),
            "sin": angles.sin().float().to(DEVICE),
            "slots": slots.to(DEVICE),
        }

    def stored(self, width: int) -> KvTensor:
        shape = (3, 16, self.kv_heads)
        scales = (
            torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) if self.kv in CODES else None
        )
        return KvTensor(torch.zeros((*shape, width), dtype=self.kv, device=DEVICE), scales)

    def call(self) -> RopeWriteCall:
        x, out = Value("x", "tokens", 1), Value("out", "tokens", 1)
        turn = (self.heads, self.width, self.rotary_dim, self.rotary_start, TABLE, self.style)
        op = RopeWrite(x, x, x, out, "kv", 0, *turn)
        return RopeWriteCall(
            op=op,
            k_stored=self.stored(self.width),
            v_stored=self.stored(self.v_width),
            **self.numbers,
        )

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates as `row_ops.rope` does."""
        cos, sin = (self.numbers[name][:, None] for name in ("cos", "sin"))
        part = x[..., self.rotary_start : self.rotary_start + self.rotary_dim].float()
        a, b = part.chunk(2, dim=-1) if self.style == "half" else (part[..., 0::2], part[..., 1::2])
        first, second = a * cos - b * sin, b * cos + a * sin
        both = (
            torch.cat([first, second], dim=-1)
            if self.style == "half"
            else torch.stack([first, second], dim=-1).flatten(-2)
        )
        out = x.clone()
        out[..., self.rotary_start : self.rotary_start + self.rotary_dim] = both.to(x.dtype)
        return out


CASES = {
    "whole heads": Case(),
    "interleaved": Case(style="interleaved", width=80, v_width=80, rotary_dim=80),
    "a part of each head": Case(width=40, rotary_dim=16),
    "a part in the middle, interleaved": Case(
        width=20, v_width=7, rotary_dim=8, rotary_start=6, style="interleaved"
    ),
    "odd widths, one kv head": Case(heads=5, kv_heads=1, width=7, v_width=13, rotary_dim=6),
    "192 and 128": Case(width=192, v_width=128, rotary_dim=192),
    "many rows": Case(rows=40),
    "padding alone": Case(rows=1),
}
TYPES = [
    (dtype, kv) for dtype in STEP for kv in (torch.float32, torch.bfloat16, torch.float16, *CODES)
]


def check(case):
    found, wanted = case.call(), case.call()
    out = TritonAttention(DEVICE).rope_write(found)
    live = wanted.slots >= 0
    wanted.k_stored.write(wanted.slots[live], case.turned(wanted.k)[live])
    wanted.v_stored.write(wanted.slots[live], wanted.v[live])
    exact = DEVICE.type == "cpu"
    tolerance = {
        "rtol": 0 if exact else STEP[case.dtype],
        "atol": 0 if exact else STEP[case.dtype],
        "equal_nan": True,
    }
    torch.testing.assert_close(out, case.turned(wanted.q), **tolerance)
    for name in ("k_stored", "v_stored"):
        for mine, its in zip(
            getattr(found, name).tensors, getattr(wanted, name).tensors, strict=True
        ):
            if mine.dtype in CODES:
                # As integers, neighbouring codes differ by 1, whatever they stand for.
                mine, its = mine.view(torch.int8).int(), its.view(torch.int8).int()
                torch.testing.assert_close(mine, its, rtol=0, atol=0 if exact else 1)
            else:
                torch.testing.assert_close(mine, its, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_shapes(name):
    check(CASES[name])


@pytest.mark.parametrize(("dtype", "kv"), TYPES)
def test_types(dtype, kv):
    check(Case(dtype=dtype, kv=kv))


@pytest.mark.parametrize("kv", CODES)
@pytest.mark.parametrize(
    "name", ["interleaved", "a part of each head", "a part in the middle, interleaved"]
)
def test_codes_have_one_scale_for_all_parts_of_a_head(name, kv):
    check(replace(CASES[name], kv=kv))


@pytest.mark.parametrize("kv", CODES)
def test_a_head_that_is_not_finite_is_nan_by_its_scale(kv):
    case = Case(kv=kv)
    case.numbers["k"][0, 1, 3] = torch.nan
    case.numbers["v"][2, 0, 5] = torch.inf
    check(case)
    call = case.call()
    TritonAttention(DEVICE).rope_write(call)
    assert call.k_stored.scales.flatten(0, 1)[call.slots[0]].isnan().tolist() == [False, True]
    assert call.v_stored.scales.flatten(0, 1)[call.slots[2]].isnan().tolist() == [True, False]


def test_no_rows():
    assert TritonAttention(DEVICE).rope_write(Case(rows=1).call()).shape == (1, 4, 24)
    empty = Case(rows=1)
    for name in list(empty.numbers):
        empty.numbers[name] = empty.numbers[name][:0]
    assert TritonAttention(DEVICE).rope_write(empty.call()).shape == (0, 4, 24)


# -- which ops are one -----------------------------------------------------------------------------


def values(*names):
    return [Value(name, "tokens", 8) for name in names]


def rope(x, out, style="half", table=TABLE):
    return ops.Rope(x, out, 2, 4, 4, 0, table, style)


def attention(q, out):
    return ops.Attention(q, out, "kv", 0, 2, 1.0)


def test_two_ropes_and_a_write_are_one():
    q, k, v, q_turned, k_turned, out = values("q", "k", "v", "q turned", "k turned", "out")
    body = [
        rope(q, q_turned),
        rope(k, k_turned),
        ops.KvWrite((k_turned,), v, "kv", 3),
        attention(q_turned, out),
    ]
    one, last = with_rope_writes(body, {"out"})
    assert one == RopeWrite(q, k, v, q_turned, "kv", 3, 2, 4, 4, 0, TABLE, "half")
    assert last is body[-1]


def test_what_is_read_by_others_or_turns_otherwise_stays():
    q, k, v, q_turned, k_turned, out, more = values(
        "q", "k", "v", "q turned", "k turned", "out", "more"
    )
    write, read = ops.KvWrite((k_turned,), v, "kv", 0), attention(q_turned, out)
    plain = [rope(q, q_turned), rope(k, k_turned), write, read]
    for body, kept in (
        ([*plain, ops.Scale(k_turned, more, 2.0)], {"more"}),
        (plain, {"out", "k turned"}),
        ([rope(q, q_turned, "interleaved"), *plain[1:]], {"out"}),
        ([rope(q, q_turned, table=ops.RopeTable((1.0, 0.25))), *plain[1:]], {"out"}),
        ([plain[0], ops.Scale(q_turned, more, 2.0), *plain[1:]], {"more"}),
        ([plain[0], ops.KvWrite((k,), v, "kv", 0), read], {"out"}),
        ([plain[0], plain[1], ops.KvWrite((k_turned, v), None, "kv", 0), read], {"out"}),
        (plain[1:3], {"out"}),
    ):
        assert with_rope_writes(body, kept) == body
