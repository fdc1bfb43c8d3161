"""Compiles Triton's kernels for an H100, which needs none: `python -m
tests.backends.torch.triton.compile_kernels [all]`.

What the interpreter takes for granted (types that loops carry, shapes that are powers of two,
memory that a program may have) is looked at here. Not in a process in which Triton interprets.
"""

import sys
from itertools import product

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.backends.torch.triton.act_mul import ACTIVATIONS, _act_mul_kernel
from octavo.backends.torch.triton.combine import _combine_kernel
from octavo.backends.torch.triton.decode import decode_kernel
from octavo.backends.torch.triton.grouped_linear import _grouped_linear_kernel
from octavo.backends.torch.triton.merge import merge_kernel
from octavo.backends.torch.triton.norm import _norm_kernel
from octavo.backends.torch.triton.packed_linear import _packed_linear_kernel, _sum_splits_kernel
from octavo.backends.torch.triton.pick import _pick_kernel
from octavo.backends.torch.triton.prefill import prefill_kernel
from octavo.backends.torch.triton.rope_write import rope_write_kernel
from octavo.backends.torch.triton.splits import BY_DISTANCE, NO_BIAS, SLOPES
from octavo.backends.torch.triton.tuning import tuned
from octavo.backends.torch.triton.unpack import _unpack_kernel

H100 = GPUTarget("cuda", 90, 32)
MOST_SHARED_BYTES = 227 << 10
DTYPES = ("*bf16", "*fp32", "*fp16")

ONE_LEVEL = {"scale_supers": None, "mins": None, "min_supers": None}
PACKED = {
    "Q4_0": (
        {"codes": "*u8", "scales": "*fp16"},
        {"NIBBLES": True, "HALF": 16, "UNIT": 16, "ZERO_POINT": 8, "lookup": None, **ONE_LEVEL},
    ),
    "Q4_K": (
        {
            "codes": "*u8",
            "scales": "*u8",
            "scale_supers": "*fp16",
            "mins": "*u8",
            "min_supers": "*fp16",
        },
        {"NIBBLES": True, "HALF": 16, "UNIT": 16, "ZERO_POINT": 0, "lookup": None},
    ),
    "Q6_K": (
        {"codes": "*i8", "scales": "*i8", "scale_supers": "*fp16"},
        {
            "NIBBLES": False,
            "HALF": 1,
            "UNIT": 16,
            "ZERO_POINT": 0,
            "lookup": None,
            "mins": None,
            "min_supers": None,
        },
    ),
    "lookup": (
        {"codes": "*u8", "scales": "*fp16", "lookup": "*fp32"},
        {"NIBBLES": True, "HALF": 1, "UNIT": 16, "ZERO_POINT": 0, **ONE_LEVEL},
    ),
    "int8": (
        {"codes": "*i8", "scales": "*fp32"},
        {"NIBBLES": False, "HALF": 1, "UNIT": 0, "ZERO_POINT": 0, "lookup": None, **ONE_LEVEL},
    ),
    "groups of 128": (
        {"codes": "*u8", "scales": "*fp16"},
        {"NIBBLES": False, "HALF": 1, "UNIT": 128, "ZERO_POINT": 128, "lookup": None, **ONE_LEVEL},
    ),
}
EXPERTS = {
    "bias": "*fp32",
    "order": "*i64",
    "tile_experts": "*i64",
    "tile_starts": "*i64",
    "tile_stops": "*i64",
}
PLAIN_MATRIX = {
    "IS_PLAIN": True,
    "NIBBLES": False,
    "HALF": 1,
    "UNIT": 0,
    "ZERO_POINT": 0,
    "lookup": None,
    "scales": None,
    **ONE_LEVEL,
}


def compile_for_h100(kernel, types, constants, launch):
    """Arguments without a type are int32; a `launch` has tiles and Triton's own options."""
    own = {name: value for name, value in launch.items() if name in ("num_warps", "num_stages")}
    constants = constants | {name: value for name, value in launch.items() if name not in own}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    made = triton.compile(ASTSource(kernel, signature, constants), target=H100, options=own)
    assert made.metadata.shared <= MOST_SHARED_BYTES, (
        f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory"
    )
    print(kernel.__name__, types, made.metadata.shared)


def rows(dtype, *, everything):
    row = {
        "a": dtype,
        "b": dtype,
        "weight": "*fp32",
        "bias": "*fp32",
        "total": dtype,
        "out": dtype,
        "eps": "fp32",
        "offset": "fp32",
    }
    for flags in product((True, False), repeat=3) if everything else [(True, True, True)]:
        constants = dict(zip(("HAS_SUM", "HAS_BIAS", "CENTERED"), flags, strict=True)) | {
            "BLOCK": 4096
        }
        constants |= {} if constants["HAS_SUM"] else {"b": None, "total": None}
        compile_for_h100(
            _norm_kernel,
            row,
            constants | ({} if constants["HAS_BIAS"] else {"bias": None}),
            {"num_warps": 8},
        )
    gate = {
        "gate": dtype,
        "up": dtype,
        "out": dtype,
        "clamp": "fp32",
        "alpha": "fp32",
        "up_offset": "fp32",
    }
    for activation in ACTIVATIONS if everything else ACTIVATIONS[:3]:
        compile_for_h100(
            _act_mul_kernel, gate, {"ACTIVATION": activation, "HAS_CLAMP": True, "BLOCK": 1024}, {}
        )
    sums = {"x": dtype, "weights": "*fp32", "out": dtype}
    compile_for_h100(_combine_kernel, sums, {"NUM": 8, "BLOCK": 1024}, {})


def products(dtype, *, everything):
    few, many = (
        tuned("grouped_linear", "*", tile_rows=16),
        tuned("grouped_linear", "*", tile_rows=64),
    )
    for types, constants in PACKED.values() if everything else [PACKED["Q4_K"]]:
        packed = {"x": dtype, "sums": "*fp32"} | types
        for tile_rows in (16, 32, 64) if everything else (16, 64):
            own = constants | {"IS_PLAIN": False, "BLOCK_M": tile_rows}
            compile_for_h100(_packed_linear_kernel, packed, own, tuned("packed_linear", "*"))
        compile_for_h100(
            _unpack_kernel,
            {"out": dtype} | types,
            constants | {"IS_PLAIN": False},
            tuned("unpack", "*"),
        )
        if everything:
            expert = {"x": dtype, "out": dtype} | EXPERTS | types
            compile_for_h100(
                _grouped_linear_kernel, expert, constants | {"IS_PLAIN": False, "BLOCK_M": 16}, few
            )
    compile_for_h100(
        _sum_splits_kernel,
        {"sums": "*fp32", "bias": dtype, "out": dtype},
        {"SPLITS": 8, "BLOCK": 256},
        {},
    )
    expert = {"x": dtype, "out": dtype, "codes": dtype} | EXPERTS
    for tile_rows, launch in ((16, few), (64, many)):
        compile_for_h100(
            _grouped_linear_kernel, expert, PLAIN_MATRIX | {"BLOCK_M": tile_rows}, launch
        )


ATTENTION = {
    "states": "*fp32",
    "accs": "*fp32",
    **dict.fromkeys(
        (
            "positions",
            "context_lens",
            "block_tables",
            "query_starts",
            "own_splits",
            "run_slots",
            "run_splits",
        ),
        "*i32",
    ),
    **dict.fromkeys(("row_of", "request_of"), "*i64"),
    **dict.fromkeys(("k_scales", "v_scales"), "*bf16"),
    **dict.fromkeys(("bias", "sinks"), "*fp32"),
    **dict.fromkeys(("scale", "cap"), "fp32"),
}
NONE = dict.fromkeys(
    (
        "k_scales",
        "v_scales",
        "bias",
        "sinks",
        "row_of",
        "request_of",
        "own_splits",
        "run_slots",
        "run_splits",
    )
)
HEADS_OF_128 = {
    "HEADS": 32,
    "SHARE": 4,
    "PARTS": 1,
    "LANE_HEADS": 4,
    "KV_HEADS": 8,
    "RUN_ROWS": 1,
    "WINDOW": 0,
    "FULL": False,
}
HEADS_OF_128 |= {
    "K_STRIDE": 128,
    "V_STRIDE": 128,
    "K_WIDTH": 128,
    "V_WIDTH": 128,
    "K_FIRST": 128,
    "K_REST": 0,
    "V_TILE": 128,
}
HEADS_OF_128 |= {
    "BIAS": NO_BIAS.value,
    "BIAS_LIMIT": 0,
    "CAPPED": False,
    "PRECISION": "tf32",
    "DTYPE": tl.bfloat16,
}
OF_80 = {"K_STRIDE": 80, "V_STRIDE": 80, "K_WIDTH": 80, "V_WIDTH": 80, "K_FIRST": 64, "K_REST": 16}
LATENT = {
    "HEADS": 16,
    "SHARE": 16,
    "LANE_HEADS": 16,
    "KV_HEADS": 1,
    "K_STRIDE": 576,
    "V_STRIDE": 576,
    "K_WIDTH": 576,
    "V_WIDTH": 512,
}
LATENT |= {"K_FIRST": 512, "K_REST": 64, "V_TILE": 512}
EXACT = {"DTYPE": tl.float32, "PRECISION": "ieee"}
CALLS = {
    "plain": ("*bf16", "*bf16", NONE, {}),
    "int8, window, soft cap, sinks": (
        "*bf16",
        "*i8",
        {"bias": None},
        {"WINDOW": 512, "CAPPED": True, **OF_80},
    ),
    "slopes": (
        "*fp16",
        "*fp16",
        {**NONE, "bias": "*fp32"},
        {"BIAS": SLOPES.value, "DTYPE": tl.float16},
    ),
    "by distance": (
        "*bf16",
        "*bf16",
        {**NONE, "bias": "*fp32"},
        {"BIAS": BY_DISTANCE.value, "BIAS_LIMIT": 128, "FULL": True},
    ),
    "latent": ("*bf16", "*bf16", NONE, LATENT),
    "fp32": ("*fp32", "*fp32", NONE, EXACT),
    "fp16 over bf16": ("*fp16", "*bf16", NONE, {"DTYPE": tl.float32}),
    "shared": (
        "*bf16",
        "*bf16",
        {**NONE, "run_slots": "*i32", "run_splits": "*i32"},
        {"RUN_ROWS": 4},
    ),
}
"""Types of q and of the cache, which of the arrays there are, and the shape where it is not that of
128-wide heads.
"""


def attention(*, everything):
    for name, (q, kv, arrays, shape) in (
        CALLS.items() if everything else [("plain", CALLS["plain"])]
    ):
        types = (
            ATTENTION
            | {"q": q, "out": q, "k": kv, "v": kv}
            | {each: kind for each, kind in arrays.items() if kind is not None}
        )
        absent = {each: None for each, kind in arrays.items() if kind is None}
        constants = HEADS_OF_128 | shape | absent
        width = constants["K_WIDTH"]
        for kernel, tile in (
            (decode_kernel, "decode_attention"),
            (prefill_kernel, "prefill_attention"),
            (merge_kernel, "merge_attention"),
        ):
            if kernel is not decode_kernel and name == "shared":
                continue
            launch = tuned(tile, "*", width=width)
            prompts = {"ROWS": launch.get("BLOCK_M", 0) // constants["LANE_HEADS"]}
            for by_split in (False, True) if kernel is prefill_kernel else (True,):
                own = constants | prompts | {"BY_SPLIT": by_split}
                compile_for_h100(
                    kernel,
                    types,
                    {each: own[each] for each in kernel.arg_names if each in own},
                    launch,
                )


def writes(dtype, *, everything):
    shape = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "K_WIDTH": 128,
        "V_WIDTH": 128,
        "START": 0,
        "PAIRS": 64,
        "STEP": 1,
        "APART": 64,
    }
    shape |= {
        "PAIR_TILE": 64,
        "REST_TILE": 0,
        "V_TILE": 128,
        "DTYPE": {"*bf16": tl.bfloat16, "*fp32": tl.float32, "*fp16": tl.float16}[dtype],
    }
    part = {"PAIRS": 16, "STEP": 2, "APART": 1, "PAIR_TILE": 16, "REST_TILE": 128}
    for kv in ("*bf16", "*i8", "*fp32") if everything else ("*i8",):
        types = {
            "q_out": dtype,
            "q": dtype,
            "k": dtype,
            "v": dtype,
            "k_numbers": kv,
            "v_numbers": kv,
            "cos": "*fp32",
            "sin": "*fp32",
        }
        types |= {"slots": "*i64", "k_scales": "*bf16", "v_scales": "*bf16"}
        absent = {} if kv == "*i8" else {"k_scales": None, "v_scales": None}
        for own in ({}, part):
            compile_for_h100(
                rope_write_kernel, types, shape | own | absent, tuned("rope_write", "*")
            )


def draws():
    row = {
        "z": "*fp64",
        "weights": "*fp64",
        "points": "*fp64",
        "top_ks": "*i32",
        "top_ps": "*fp32",
        "tokens": "*i64",
    }
    for constants in ({}, {"top_ks": None, "top_ps": None}):
        compile_for_h100(_pick_kernel, row, constants, tuned("pick", "*"))


if __name__ == "__main__":
    everything = sys.argv[1:] == ["all"]
    for dtype in DTYPES if everything else DTYPES[:1]:
        rows(dtype, everything=everything)
        products(dtype, everything=everything)
        writes(dtype, everything=everything)
    attention(everything=everything)
    draws()
