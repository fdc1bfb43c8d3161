"""Compiles Triton's kernels for an H100, which needs none: `python -m tests.backends.torch.compile_kernels [all]`.

What the interpreter takes for granted (types that loops carry, shapes that are powers of two, memory that a program may have) is looked
at here. Not in a process in which Triton interprets.
"""

import sys
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.backends.torch.triton.act_mul import ACTIVATIONS, _act_mul_kernel
from octavo.backends.torch.triton.combine import _combine_kernel
from octavo.backends.torch.triton.grouped_linear import _grouped_linear_kernel
from octavo.backends.torch.triton.norm import _norm_kernel
from octavo.backends.torch.triton.packed_linear import _packed_linear_kernel, _sum_splits_kernel
from octavo.backends.torch.triton.pick import _pick_kernel
from octavo.backends.torch.triton.tuning import tuned

H100 = GPUTarget("cuda", 90, 32)
MOST_SHARED_BYTES = 227 << 10
DTYPES = ("*bf16", "*fp32", "*fp16")

ONE_LEVEL = {"scale_supers": None, "mins": None, "min_supers": None}
PACKED = {
    "Q4_0": ({"codes": "*u8", "scales": "*fp16"}, {"NIBBLES": True, "HALF": 16, "UNIT": 16, "ZERO_POINT": 8, "lookup": None, **ONE_LEVEL}),
    "Q4_K": (
        {"codes": "*u8", "scales": "*u8", "scale_supers": "*fp16", "mins": "*u8", "min_supers": "*fp16"},
        {"NIBBLES": True, "HALF": 16, "UNIT": 16, "ZERO_POINT": 0, "lookup": None},
    ),
    "Q6_K": (
        {"codes": "*i8", "scales": "*i8", "scale_supers": "*fp16"},
        {"NIBBLES": False, "HALF": 1, "UNIT": 16, "ZERO_POINT": 0, "lookup": None, "mins": None, "min_supers": None},
    ),
    "lookup": (
        {"codes": "*u8", "scales": "*fp16", "lookup": "*fp32"},
        {"NIBBLES": True, "HALF": 1, "UNIT": 16, "ZERO_POINT": 0, **ONE_LEVEL},
    ),
    "int8": ({"codes": "*i8", "scales": "*fp32"}, {"NIBBLES": False, "HALF": 1, "UNIT": 0, "ZERO_POINT": 0, "lookup": None, **ONE_LEVEL}),
    "groups of 128": (
        {"codes": "*u8", "scales": "*fp16"},
        {"NIBBLES": False, "HALF": 1, "UNIT": 128, "ZERO_POINT": 128, "lookup": None, **ONE_LEVEL},
    ),
}
EXPERTS = {"bias": "*fp32", "order": "*i64", "tile_experts": "*i64", "tile_starts": "*i64", "tile_stops": "*i64"}
PLAIN_MATRIX = {"IS_PLAIN": True, "NIBBLES": False, "HALF": 1, "UNIT": 0, "ZERO_POINT": 0, "lookup": None, "scales": None, **ONE_LEVEL}


def compile_for_h100(kernel, types, constants, launch):
    """Arguments without a type are int32; a `launch` has tiles and Triton's own options."""
    own = {name: value for name, value in launch.items() if name in ("num_warps", "num_stages")}
    constants = constants | {name: value for name, value in launch.items() if name not in own}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, constants), target=H100, options=own)
    assert made.metadata.shared <= MOST_SHARED_BYTES, f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory"
    print(kernel.__name__, types, made.metadata.shared)


def rows(dtype, *, everything):
    row = {"a": dtype, "b": dtype, "weight": "*fp32", "bias": "*fp32", "total": dtype, "out": dtype, "eps": "fp32", "offset": "fp32"}
    for flags in product((True, False), repeat=3) if everything else [(True, True, True)]:
        constants = dict(zip(("HAS_SUM", "HAS_BIAS", "CENTERED"), flags, strict=True)) | {"BLOCK": 4096}
        constants |= {} if constants["HAS_SUM"] else {"b": None, "total": None}
        compile_for_h100(_norm_kernel, row, constants | ({} if constants["HAS_BIAS"] else {"bias": None}), {"num_warps": 8})
    gate = {"gate": dtype, "up": dtype, "out": dtype, "clamp": "fp32", "alpha": "fp32", "up_offset": "fp32"}
    for activation in ACTIVATIONS if everything else ACTIVATIONS[:3]:
        compile_for_h100(_act_mul_kernel, gate, {"ACTIVATION": activation, "HAS_CLAMP": True, "BLOCK": 1024}, {})
    sums = {"x": dtype, "weights": "*fp32", "out": dtype}
    compile_for_h100(_combine_kernel, sums, {"NUM": 8, "BLOCK": 1024}, {})


def products(dtype, *, everything):
    few, many = tuned("grouped_linear", "*", tile_rows=16), tuned("grouped_linear", "*", tile_rows=64)
    for types, constants in PACKED.values() if everything else [PACKED["Q4_K"]]:
        packed = {"x": dtype, "sums": "*fp32"} | types
        compile_for_h100(_packed_linear_kernel, packed, constants | {"IS_PLAIN": False, "BLOCK_M": 16}, tuned("packed_linear", "*"))
        if everything:
            expert = {"x": dtype, "out": dtype} | EXPERTS | types
            compile_for_h100(_grouped_linear_kernel, expert, constants | {"IS_PLAIN": False, "BLOCK_M": 16}, few)
    compile_for_h100(_sum_splits_kernel, {"sums": "*fp32", "bias": dtype, "out": dtype}, {"SPLITS": 8, "BLOCK": 256}, {})
    expert = {"x": dtype, "out": dtype, "codes": dtype} | EXPERTS
    for tile_rows, launch in ((16, few), (64, many)):
        compile_for_h100(_grouped_linear_kernel, expert, PLAIN_MATRIX | {"BLOCK_M": tile_rows}, launch)


def draws():
    row = {"z": "*fp64", "weights": "*fp64", "points": "*fp64", "top_ks": "*i32", "top_ps": "*fp32", "tokens": "*i64"}
    for constants in ({}, {"top_ks": None, "top_ps": None}):
        compile_for_h100(_pick_kernel, row, constants, tuned("pick", "*"))


if __name__ == "__main__":
    everything = sys.argv[1:] == ["all"]
    for dtype in DTYPES if everything else DTYPES[:1]:
        rows(dtype, everything=everything)
        products(dtype, everything=everything)
    draws()
