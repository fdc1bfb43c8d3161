"""PTX that writes codes into floats, run in NumPy over all 65,536 pairs of code bytes: Triton's
interpreter takes another path there.
"""

import re

import numpy as np
import pytest
import torch

tl = pytest.importorskip("triton.language")

from octavo.executor.torch.triton.codes import (  # noqa: E402
    E4M3_IN_BF16,
    E4M3_PAIRS_IN_BF16,
    NIBBLES_IN_BF16,
    NIBBLES_IN_FP16,
    pair_bits,
)


def in_bf16(words):
    """Returns the two bf16 numbers of each word as fp32, `[N, 2]`."""
    halves = torch.from_numpy(words.view(np.int16).reshape(-1, 2).copy())
    return halves.view(torch.bfloat16).float()


def multiplied_and_added(a, b, c):
    pairs = (in_bf16(a) * in_bf16(b) + in_bf16(c)).bfloat16().view(torch.int16)
    return pairs.numpy().view(np.uint32)[:, 0]


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
    "fma.rn.bf16x2": multiplied_and_added,
}


def permuted(a, b, selector):
    """Returns PTX's prmt: each byte of the result is one of the eight bytes of b and a."""
    octet = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], axis=1)
    chosen = [(int(selector[0]) >> 4 * at) & 7 for at in range(4)]
    return np.ascontiguousarray(octet[:, chosen]).view(np.uint32)[:, 0]


def run(assembly, word):
    """Runs instructions over `word [N] uint32`, the last operand; returns the results in order."""
    registers = {f"${assembly.count('prmt')}": word}

    def value(name):
        if name in registers:
            return registers[name]
        return np.full(len(word), int(name, 0), np.uint32)

    for line in re.findall(r"^\s*(\w[\w.]+) (.*);$", assembly, re.MULTILINE):
        operation, operands = line[0], [operand.strip() for operand in line[1].split(",")]
        target, *sources = operands
        compute = permuted if operation == "prmt.b32" else OPERATIONS[operation]
        registers[target] = compute(*map(value, sources))
    return [registers[f"${at}"] for at in range(assembly.count("prmt"))]


@pytest.mark.parametrize(
    ("assembly", "dtype", "base"),
    [(NIBBLES_IN_BF16, torch.bfloat16, 128), (NIBBLES_IN_FP16, torch.float16, 1024)],
    ids=["bf16", "fp16"],
)
def test_nibbles_of_every_pair_of_bytes(assembly, dtype, base):
    pairs = np.arange(1 << 16, dtype=np.uint32)
    word = pairs | ((pairs[::-1] * 40503) << 16)
    code_bytes = word[:, None].view(np.uint8)
    found = run(assembly.value, word)
    halves = [np.stack(found[at : at + 2], axis=1).view(np.int16) for at in (0, 2)]
    for half, codes in zip(halves, (code_bytes & 15, code_bytes >> 4), strict=True):
        floats = torch.from_numpy(half.copy()).view(dtype).float().numpy()
        np.testing.assert_array_equal(floats, base + codes.astype(np.float32))


@pytest.mark.parametrize(
    ("assembly", "order"),
    [(E4M3_IN_BF16, [0, 1, 2, 3]), (E4M3_PAIRS_IN_BF16, [0, 2, 1, 3])],
    ids=["in order", "pairs"],
)
def test_every_e4m3_code(assembly, order):
    codes = np.arange(256, dtype=np.uint8)
    quads = np.stack([codes, np.roll(codes, 3), np.roll(codes, 77), codes[::-1]], axis=1)
    found = run(assembly.value, np.ascontiguousarray(quads).view(np.uint32)[:, 0])
    wanted = torch.from_numpy(quads[:, order]).view(torch.float8_e4m3fn).float()
    # Code 127 is NaN, and no stored row has it.
    wanted = wanted.nan_to_num(480.0).copysign(
        torch.where(torch.from_numpy(quads[:, order]) > 127, -1.0, 1.0)
    )
    assert torch.equal(torch.cat([in_bf16(words) for words in found], dim=1), wanted)


@pytest.mark.parametrize("zero_point", [0, 7, 8, 16])
@pytest.mark.parametrize(
    ("kind", "dtype", "base"),
    [(tl.bfloat16, torch.bfloat16, 128), (tl.float16, torch.float16, 1024)],
    ids=["bf16", "fp16"],
)
def test_the_bits_of_the_base(kind, dtype, base, zero_point):
    bits = int(pair_bits(zero_point, kind), 16)
    pair = torch.from_numpy(np.array([bits], np.uint32).view(np.int16)).view(dtype)
    assert pair.tolist() == [-base - zero_point] * 2
