"""Converts codes to floats, and floats to e4m3, by bit manipulation.

On a GPU, converting an integer takes as long as eight other operations of a lane. But if a float's
lowest bits are a code and the bits above are those of a power of two, the float equals that power
plus the code:

    fp32   4300 00cc << 16      128 + c       c of 4 bits; the upper half is a bf16
    fp32   4700 cc00            32768 + c     c of 8 bits
    bf16   43cc                 128 + c where c < 128; bit 7 of c is the exponent's lowest

An e4m3 code has a float's fields already, with 4 bits of exponent and 3 of mantissa: moved to the
top of a float's fields they are the same number, subnormal ones included, but for the difference
of the exponents' biases. Its NaN becomes 480; no stored row has one.

PTX instructions process four codes, the bytes of a word, at a time. Without PTX (Triton's
interpreter, AMD GPUs), codes are converted normally, with the same results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.executor.torch.triton.numbers import PTX, nearest_integer, rounded

NIBBLE_BASE = tl.constexpr(128.0)
"""Offset that `based_nibbles` adds to each code."""


NIBBLES_IN_BF16 = tl.constexpr("""{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
}""")
"""Four code bytes to their low halves ($0, $1) and high halves ($2, $3), two bf16 a register."""

NIBBLES_IN_FP16 = tl.constexpr(NIBBLES_IN_BF16.value.replace("0x43434343", "0x64646464"))
"""The same in fp16."""


@triton.jit
def based_nibbles(packed):
    """Returns NIBBLE_BASE plus the low and the high half of each byte, as two fp32 tiles."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $8, 0x0f0f0f0f;
            shr.u32 high, $8, 4;
            and.b32 high, high, 0x0f0f0f0f;
            prmt.b32 $0, low, 0x43000000, 0x7044;
            prmt.b32 $1, low, 0x43000000, 0x7144;
            prmt.b32 $2, low, 0x43000000, 0x7244;
            prmt.b32 $3, low, 0x43000000, 0x7344;
            prmt.b32 $4, high, 0x43000000, 0x7044;
            prmt.b32 $5, high, 0x43000000, 0x7144;
            prmt.b32 $6, high, 0x43000000, 0x7244;
            prmt.b32 $7, high, 0x43000000, 0x7344;
            }""",
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low = (packed & 15).to(tl.float32) + NIBBLE_BASE
        high = (packed >> 4).to(tl.float32) + NIBBLE_BASE
    return low, high


@triton.constexpr_function
def nibble_base(dtype):
    """Returns the power of two whose mantissa's lowest bits `spread_nibbles` replaces by a code, in
    bf16 or fp16.
    """
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def spread_nibbles(packed, dtype: tl.constexpr):
    """Returns the base (`nibble_base`) plus the low and the high half of each byte, as two tiles of
    bf16 or fp16; exact.
    """
    if PTX:
        low, high = tl.inline_asm_elementwise(
            NIBBLES_IN_BF16 if dtype == tl.bfloat16 else NIBBLES_IN_FP16,
            constraints="=r,=r,=r,=r,r",
            args=[packed],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=4,
        )
        low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    else:
        BASE: tl.constexpr = nibble_base(dtype)
        low = rounded((packed & 15).to(tl.float32) + BASE, dtype)
        high = rounded((packed >> 4).to(tl.float32) + BASE, dtype)
    return low, high


@triton.jit
def small_codes(codes, ZERO_POINT: tl.constexpr, dtype: tl.constexpr):
    """Converts codes of up to 8 bits, minus the zero point, to bf16 or fp16; exact."""
    if ZERO_POINT == 0:
        values = bytes_in(codes, dtype)
    else:
        values = rounded(bytes_in_fp32(codes) - ZERO_POINT, dtype)
    return values


@triton.jit
def negative_base(
    codes,
    ZERO_POINT: tl.constexpr,
    dtype: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Returns a tile `[GROUPS, ROWS, UNIT]` (without the first axis for one group) of
    -(nibble_base + ZERO_POINT).

    On a GPU it seems to be converted from bytes at `codes`: operands of matmuls have the layout of
    the type that they were loaded as, and x can be loaded once only if both of its matmuls have the
    same.
    """
    if GROUPS > 1:
        none = tl.zeros((GROUPS, ROWS, UNIT), tl.int32)
    else:
        none = tl.zeros((ROWS, UNIT), tl.int32)
    if PTX:
        BITS: tl.constexpr = pair_bits(ZERO_POINT, dtype)
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, " + BITS + "; mov.b32 $1, " + BITS + ";",
            constraints="=r,=r,r",
            args=[tl.load(codes + none)],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        ).to(dtype, bitcast=True)
    else:
        tile = rounded(none.to(tl.float32) - nibble_base(dtype) - ZERO_POINT, dtype)
    return tile


@triton.constexpr_function
def pair_bits(zero_point, dtype):
    """Returns the bits of two numbers -(nibble_base + zero_point), as PTX writes them."""
    bits = (0xC300 if dtype == tl.bfloat16 else 0xE400) + zero_point
    return hex(bits << 16 | bits)


@triton.jit
def bytes_in_fp32(codes):
    """Converts codes of up to 8 bits to fp32."""
    if PTX and codes.dtype == tl.int8:
        based = tl.inline_asm_elementwise(
            """{
            .reg .b32 unsigned;
            xor.b32 unsigned, $4, 0x80808080;
            prmt.b32 $0, unsigned, 0x47000000, 0x7404;
            prmt.b32 $1, unsigned, 0x47000000, 0x7414;
            prmt.b32 $2, unsigned, 0x47000000, 0x7424;
            prmt.b32 $3, unsigned, 0x47000000, 0x7434;
            }""",
            constraints="=r,=r,=r,=r,r",
            args=[codes],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        values = based - (32768.0 + 128.0)
    elif PTX:
        based = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0x47000000, 0x7404;
            prmt.b32 $1, $4, 0x47000000, 0x7414;
            prmt.b32 $2, $4, 0x47000000, 0x7424;
            prmt.b32 $3, $4, 0x47000000, 0x7434;
            """,
            constraints="=r,=r,=r,=r,r",
            args=[codes],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        values = based - 32768.0
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def bytes_in(codes, dtype: tl.constexpr):
    """Converts int8 codes to `dtype` exactly.

    In bf16, with b bit 7 of a code and c its other bits, it is (128 + c) - (128 + 128 b).
    """
    if PTX and codes.dtype == tl.int8 and dtype == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 one, first, second, first_base, second_base;
            mov.b32 one, 0x3f803f80;
            prmt.b32 first, $2, 0x43434343, 0x4140;
            prmt.b32 second, $2, 0x43434343, 0x4342;
            lop3.b32 first_base, first, 0x00800080, 0xc300c300, 0xea;
            lop3.b32 second_base, second, 0x00800080, 0xc300c300, 0xea;
            and.b32 first, first, 0xff7fff7f;
            and.b32 second, second, 0xff7fff7f;
            fma.rn.bf16x2 $0, first, one, first_base;
            fma.rn.bf16x2 $1, second, one, second_base;
            }""",
            constraints="=r,=r,r",
            args=[codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        values = rounded(bytes_in_fp32(codes), dtype)
    return values


@triton.jit
def unpack_pairs(words, code_type: tl.constexpr, dtype: tl.constexpr):
    """Converts the low and high bytes of int16 words to two tiles in `dtype`; they are int8 codes,
    or e4m3 codes (`code_type` uint8).
    """
    if code_type == tl.uint8:
        low, high = _unpack_e4m3_pairs(words, dtype)
    else:
        low, high = _unpack_int8_pairs(words, dtype)
    return low, high


@triton.jit
def _unpack_int8_pairs(words, dtype: tl.constexpr):
    if PTX and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 one, low, high, low_base, high_base;
            mov.b32 one, 0x3f803f80;
            prmt.b32 low, $2, 0x43434343, 0x4240;
            prmt.b32 high, $2, 0x43434343, 0x4341;
            lop3.b32 low_base, low, 0x00800080, 0xc300c300, 0xea;
            lop3.b32 high_base, high, 0x00800080, 0xc300c300, 0xea;
            and.b32 low, low, 0xff7fff7f;
            and.b32 high, high, 0xff7fff7f;
            fma.rn.bf16x2 $0, low, one, low_base;
            fma.rn.bf16x2 $1, high, one, high_base;
            }""",
            constraints="=r,=r,r",
            args=[words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = rounded(((words << 8) >> 8).to(tl.float32), dtype)
        high = rounded((words >> 8).to(tl.float32), dtype)
    return low, high


E4M3_LARGEST = tl.constexpr(448.0)

E4M3_IN_BF16 = tl.constexpr("""{
    .reg .b32 large, zero, first, second, size;
    mov.b32 large, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 first, $2, 0, 0x1404;
    prmt.b32 second, $2, 0, 0x3424;
    and.b32 size, first, 0x7f007f00;
    shr.u32 size, size, 4;
    lop3.b32 first, first, 0x80008000, size, 0xea;
    and.b32 size, second, 0x7f007f00;
    shr.u32 size, size, 4;
    lop3.b32 second, second, 0x80008000, size, 0xea;
    fma.rn.bf16x2 $0, first, large, zero;
    fma.rn.bf16x2 $1, second, large, zero;
}""")
"""Four e4m3 codes to bf16, two a register, in their order: fields moved, times 2^120."""

E4M3_PAIRS_IN_BF16 = tl.constexpr(
    E4M3_IN_BF16.value.replace("0x1404", "0x2404").replace("0x3424", "0x3414")
)
"""The same, but the first and third code in $0, the others in $1."""


@triton.jit
def e4m3_in(codes, dtype: tl.constexpr):
    """Converts e4m3 codes, as uint8, to `dtype` exactly."""
    if PTX and dtype == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            E4M3_IN_BF16, "=r,=r,r", args=[codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        values = _e4m3_bits_in(codes.to(tl.int32), dtype)
    return values


@triton.jit
def _unpack_e4m3_pairs(words, dtype: tl.constexpr):
    if PTX and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            E4M3_PAIRS_IN_BF16,
            "=r,=r,r",
            args=[words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = _e4m3_bits_in(words.to(tl.int32), dtype)
        high = _e4m3_bits_in(words.to(tl.int32) >> 8, dtype)
    return low, high


@triton.jit
def _e4m3_bits_in(bits, dtype: tl.constexpr):
    """Converts the lowest byte of `bits` int32."""
    moved = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    return rounded(moved.to(tl.float32, bitcast=True) * 1.329227995784916e36, dtype)


@triton.jit
def e4m3_codes(x):
    """Rounds fp32 to e4m3 codes as uint8, ties to even; |x| is at most 448."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = nearest_integer(size * 512.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)
