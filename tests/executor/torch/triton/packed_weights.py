"""Packed weights of every kind, small and finite, for tests of products."""

import numpy as np

from octavo.quant.online import pack_int4, pack_int8
from octavo.quant.packed import Levels, PackedWeight


def kinds(width=256, outputs=70, lead=()):
    """Returns weights `[*lead, outputs, width]` by name, `width` a multiple of 256. The last ones
    are those that only plain torch multiplies with.
    """
    rng = np.random.default_rng(width + outputs)

    def levels(groups, *, two=False, integers=np.uint8):
        shape = (*lead, outputs, groups)
        if not two:
            return Levels(rng.uniform(0.01, 0.02, shape).astype(np.float16))
        low = 0 if integers is np.uint8 else -30
        return Levels(
            rng.integers(low, 63, shape).astype(integers),
            rng.uniform(0.01, 0.02, (*lead, outputs, width // 256)).astype(np.float16),
        )

    def weight(bits, group, **more):
        code = more.get("code", "uint")
        count = width // 2 if bits == 4 else width
        low, high = (
            (0, 256)
            if bits == 4
            else (-(1 << bits - 1), 1 << bits - 1)
            if code == "int"
            else (0, 1 << bits)
        )
        codes = rng.integers(low, high, (*lead, outputs, count)).astype(
            np.int8 if code == "int" else np.uint8
        )
        return PackedWeight(
            (*lead, outputs, width),
            bits,
            code,
            codes,
            group,
            **{name: value for name, value in more.items() if name != "code"},
        )

    floats = rng.normal(size=(*lead, outputs, width)).astype(np.float32)
    table = rng.normal(size=16).astype(np.float32)
    return {
        "Q4_0": weight(4, 32, scales=levels(width // 32), zero_point=8, nibbles="halves"),
        "Q4_1": weight(
            4, 32, scales=levels(width // 32), mins=levels(width // 32), nibbles="halves"
        ),
        "Q5_0": weight(5, 32, scales=levels(width // 32), code="int"),
        "Q8_0": weight(8, 32, scales=levels(width // 32), code="int"),
        "Q4_K": weight(
            4,
            32,
            scales=levels(width // 32, two=True),
            mins=levels(width // 32, two=True),
            nibbles="halves",
        ),
        "Q5_K": weight(
            5, 32, scales=levels(width // 32, two=True), mins=levels(width // 32, two=True)
        ),
        "Q6_K": weight(6, 16, scales=levels(width // 16, two=True, integers=np.int8), code="int"),
        "pairs": weight(
            4, 128, scales=levels(width // 128), mins=levels(width // 128), nibbles="pairs"
        ),
        "zeros": weight(
            4,
            32,
            scales=levels(width // 32),
            zeros=rng.integers(0, 17, (*lead, outputs, width // 32)).astype(np.int8),
            nibbles="pairs",
        ),
        "a large group": weight(
            4, 256, scales=levels(width // 256), zero_point=7, nibbles="halves"
        ),
        "lookup": weight(4, 16, scales=levels(width // 16), lookup=table, code="lookup"),
        "zero point": weight(8, 64, scales=levels(width // 64), zero_point=128),
        "int8": pack_int8(floats),
        "int8, odd width": pack_int8(floats[..., :70].copy()),
        "int4": pack_int4(floats),
        "int4, narrow": pack_int4(floats[..., :96].copy()),
    }


def uncarried(width=256, outputs=70):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (outputs, width // 2), np.uint8)
    order = rng.permutation(width).astype(np.int32)
    scales = Levels(rng.uniform(0.01, 0.02, (outputs, width // 32)).astype(np.float16))
    by_96 = Levels(rng.uniform(0.01, 0.02, (outputs, -(-width // 96))).astype(np.float16))
    floats = rng.normal(size=(outputs, width)).astype(np.float32)
    return {
        "plain": PackedWeight.plain(floats),
        "permuted": PackedWeight(
            (outputs, width), 4, "uint", codes, 32, scales, input_permutation=order
        ),
        "groups of 96": PackedWeight(
            (outputs, width), 8, "uint", rng.integers(0, 256, (outputs, width), np.uint8), 96, by_96
        ),
    }
