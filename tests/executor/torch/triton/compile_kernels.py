"""Compiles Triton's kernels for an H100, without one:
`python -m tests.executor.torch.triton.compile_kernels [all]`.

Finds what the interpreter takes for granted: types that loops carry, shapes that are powers of two,
the shared memory that a program may have. Runs in a process in which Triton does not interpret.
"""

import inspect
import sys
from itertools import product

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.executor.torch.triton import attention_arguments as bundles
from octavo.executor.torch.triton.act_mul import ACTIVATIONS, act_mul_kernel
from octavo.executor.torch.triton.combine import combine_kernel
from octavo.executor.torch.triton.decode import decode_kernel
from octavo.executor.torch.triton.fp8_rows import quantize_kernel
from octavo.executor.torch.triton.grouped_linear import ExpertTiles, grouped_linear_kernel
from octavo.executor.torch.triton.matrix_tile import MatrixBytes
from octavo.executor.torch.triton.merge import merge_kernel
from octavo.executor.torch.triton.norm import norm_kernel
from octavo.executor.torch.triton.packed_linear import (
    FEWEST_ROWS,
    TILE_ROWS,
    packed_linear_kernel,
)
from octavo.executor.torch.triton.pick import pick_kernel
from octavo.executor.torch.triton.prefill import prefill_kernel
from octavo.executor.torch.triton.rope_write import (
    Angles,
    CacheSlots,
    HeadWidths,
    StridedRows,
    TurnedPairs,
    rope_write_kernel,
)
from octavo.executor.torch.triton.splits import BY_DISTANCE, NO_BIAS, SLOPES
from octavo.executor.torch.triton.tuning import tuned
from octavo.executor.torch.triton.unpack import unpack_kernel

H100 = GPUTarget("cuda", 90, 32)
MOST_SHARED_BYTES = 227 << 10
DTYPES = ("*bf16", "*fp32", "*fp16")


def constants(*values):
    return tuple(map(tl.constexpr, values))


SIZES = dict.fromkeys(("num_outputs", "row_bytes", "num_groups"), "i32")


def matrix(codes, scales, *, nibbles=False, half=1, unit=16, zero_point=0, plain=False, **arrays):
    """Returns the types of a packed weight's arrays, and its constants."""
    group = max(1, 2 * unit if nibbles else unit)
    absent = dict.fromkeys(("lookup", "scale_supers", "mins", "min_supers", "zeros"))
    return MatrixBytes(
        codes=codes,
        scales=scales,
        **absent | arrays | SIZES,
        SCALE_SUPERS_OF=tl.constexpr(256 // group),
        MIN_SUPERS_OF=tl.constexpr(256 // group),
        IS_PLAIN=tl.constexpr(plain),
        NIBBLES=tl.constexpr(nibbles),
        HALF=tl.constexpr(half),
        UNIT=tl.constexpr(unit),
        ZERO_POINT=tl.constexpr(zero_point),
        BY_ROW=tl.constexpr(unit == 0 and not plain),
    )


Q4_K = matrix(
    "*u8", "*u8", nibbles=True, half=16, scale_supers="*fp16", mins="*u8", min_supers="*fp16"
)
PACKED = {
    "Q4_0": matrix("*u8", "*fp16", nibbles=True, half=16, zero_point=8),
    "Q4_K": Q4_K,
    "Q6_K": matrix("*i8", "*i8", scale_supers="*fp16"),
    "lookup": matrix("*u8", "*fp16", nibbles=True, lookup="*fp32"),
    "int8": matrix("*i8", "*fp32", unit=0),
    "groups of 128": matrix("*u8", "*fp16", unit=128, zero_point=128),
}


def compile_for_h100(kernel, arguments, launch, aligned=()):
    """Compiles a kernel for arguments by name: types, constants (None is one) and bundles of both.
    Arguments that are not named are int32. A `launch` has tiles and Triton's own options.

    With `aligned`, arrays and the int32 named there, also in bundles, are multiples of 16, as they
    are in a real launch. Returns the compiled kernel.
    """
    own = {name: value for name, value in launch.items() if name in ("num_warps", "num_stages")}
    tiles = {name: tl.constexpr(value) for name, value in launch.items() if name not in own}
    named = dict.fromkeys(kernel.arg_names, "i32") | arguments | tiles
    found = {}
    signature = {
        name: signature_of(named[name], (at,), found) for at, name in enumerate(kernel.arg_names)
    }
    attributes = {}
    if aligned:
        for at, name in enumerate(kernel.arg_names):
            attributes |= multiples_of_16(named[name], name, (at,), aligned)
    source = ASTSource(kernel, signature, found, attributes)
    made = triton.compile(source, target=H100, options=own)
    assert made.metadata.shared <= MOST_SHARED_BYTES, (
        f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory"
    )
    return made


def multiples_of_16(argument, name, path, aligned):
    """Returns Triton's attributes of the arrays and aligned numbers of an argument."""
    if isinstance(argument, tuple):
        found = {}
        fields = inspect.signature(type(argument)).parameters
        for at, (field, part) in enumerate(zip(fields, argument, strict=True)):
            found |= multiples_of_16(part, field, (*path, at), aligned)
        return found
    is_array = isinstance(argument, str) and argument.startswith("*")
    is_number = isinstance(argument, str) and name in aligned
    return {path: [["tt.divisibility", 16]]} if is_array or is_number else {}


def signature_of(argument, path, found):
    """Returns the types of an argument, and puts its constants into `found` by their path."""
    if isinstance(argument, tuple):
        parts = [signature_of(part, (*path, at), found) for at, part in enumerate(argument)]
        return type(argument)(*parts)
    if isinstance(argument, str):
        return argument
    found[path] = argument.value if isinstance(argument, tl.constexpr) else argument
    return "constexpr"


def rows(dtype, *, everything):
    arrays = {"a": dtype, "b": dtype, "total": dtype, "out": dtype}
    norm = arrays | {"weight": "*fp32", "bias": "*fp32", "eps": "fp32", "offset": "fp32"}
    for has_sum, has_bias, centered in (
        product((True, False), repeat=3) if everything else [(True, True, True)]
    ):
        absent = {} if has_sum else {"b": None, "total": None}
        absent |= {} if has_bias else {"bias": None}
        flags = {"HAS_SUM": has_sum, "HAS_BIAS": has_bias, "CENTERED": centered}
        compile_for_h100(norm_kernel, norm | absent, flags | {"BLOCK": 4096, "num_warps": 8})
    gate = dict.fromkeys(("gate", "up", "out"), dtype)
    gate |= dict.fromkeys(("clamp", "alpha", "up_offset"), "fp32")
    for activation in ACTIVATIONS if everything else ACTIVATIONS[:3]:
        launch = {"ACTIVATION": activation, "HAS_CLAMP": True, "BLOCK": 1024}
        compile_for_h100(act_mul_kernel, gate, launch)
    sums = {"x": dtype, "weights": "*fp32", "out": dtype}
    compile_for_h100(combine_kernel, sums, {"NUM": 8, "BLOCK": 1024})
    quantized = {"x": dtype, "codes": "*u8", "scales": "*fp32"}
    compile_for_h100(quantize_kernel, quantized, {"BLOCK": 4096, "num_warps": 8})


def products(dtype, *, everything):
    few = tuned("grouped_linear", "*", tile_rows=16)
    many = tuned("grouped_linear", "*", tile_rows=64)
    experts = {"x": dtype, "out": dtype, "bias": "*fp32"}
    experts["tiles"] = ExpertTiles(*["*i64"] * 4, num_experts="i32")
    for packed in PACKED.values() if everything else [Q4_K]:
        arrays = {"x": dtype, "bias": dtype, "out": dtype, "matrix": packed}
        one_split = arrays | {"sums": None, "arrivals": None}
        several = arrays | {"sums": "*fp32", "arrivals": "*i32"}
        for tile_rows in (FEWEST_ROWS, TILE_ROWS):
            launch = tuned("packed_linear", "*") | {"BLOCK_M": tile_rows}
            compile_for_h100(packed_linear_kernel, one_split, launch)
            compile_for_h100(packed_linear_kernel, several, launch)
        compile_for_h100(unpack_kernel, {"out": dtype, "matrix": packed}, tuned("unpack", "*"))
        if everything:
            arrays = experts | {"matrix": packed}
            compile_for_h100(grouped_linear_kernel, arrays, few | {"BLOCK_M": 16})
    plain = matrix(dtype, None, unit=0, plain=True)
    for tile_rows, launch in ((16, few), (64, many)):
        arrays = experts | {"matrix": plain}
        compile_for_h100(grouped_linear_kernel, arrays, launch | {"BLOCK_M": tile_rows})


def call_of(
    q="*bf16",
    kv="*bf16",
    *,
    scales=None,
    sinks=None,
    bias=None,
    bias_kind=NO_BIAS,
    limit=0,
    capped=False,
    window=0,
    chunk=0,
    full=False,
    heads=(32, 4, 8),
    widths=(128, 128, 128, 0, 128),
    v_stride=128,
    dtype=tl.bfloat16,
    precision="tf32",
    runs=(None, None, None, 1),
):
    """Returns the bundles of an attention call, with 128 columns a head unless `widths` says
    otherwise. `heads` are the query heads, those of a KV head, and the KV heads.
    """
    num_heads, share, kv_heads = heads
    *run_arrays, run_rows = runs
    kv_constants = constants(kv_heads, widths[0], v_stride)
    score_constants = constants(bias_kind.value, limit, capped, precision)
    return {
        "q": bundles.Queries(q, "i32", "i32", tl.constexpr(dtype)),
        "kv": bundles.PagedKv(kv, kv, scales, scales, "*i32", *kv_constants),
        "scoring": bundles.Scoring("fp32", "fp32", bias, *score_constants),
        "mask": bundles.Mask(*constants(window, chunk, full)),
        "widths": bundles.Widths(*constants(*widths)),
        "states": bundles.SplitStates("*fp32", "*fp32"),
        "slots": bundles.Slots("*i32", "*i32", *(["*i64"] * 2 if scales else [None] * 2)),
        "runs": bundles.Runs(*run_arrays, tl.constexpr(run_rows)),
        "requests": bundles.Requests("*i32", "*i32", "*i32"),
        "sinks": sinks,
        "out": q,
    }, (num_heads, share)


LATENT = (576, 512, 512, 64, 512)
CALLS = {
    "plain": call_of(),
    "int8, window, soft cap, sinks": call_of(
        kv="*i8",
        scales="*bf16",
        sinks="*fp32",
        window=512,
        capped=True,
        widths=(80, 80, 64, 16, 128),
        v_stride=80,
        runs=("*i32", "*i32", "*i32", 1),
    ),
    "fp8": call_of(kv="*u8", scales="*bf16"),
    "chunks": call_of(chunk=8192),
    "slopes": call_of("*fp16", "*fp16", bias="*fp32", bias_kind=SLOPES, dtype=tl.float16),
    "by distance": call_of(bias="*fp32", bias_kind=BY_DISTANCE, limit=128, full=True),
    "latent": call_of(heads=(16, 16, 1), widths=LATENT, v_stride=576),
    "fp32": call_of("*fp32", "*fp32", dtype=tl.float32, precision="ieee"),
    "fp16 over bf16": call_of("*fp16", "*bf16", dtype=tl.float32),
    "shared": call_of(runs=("*i32", "*i32", None, 4)),
}


def attention(*, everything):
    for name, (arguments, (num_heads, share)) in (
        CALLS.items() if everything else [("plain", CALLS["plain"])]
    ):
        width = arguments["widths"].K.value
        decode = tuned("decode_attention", "*", width=width)
        prefill = tuned("prefill_attention", "*", width=width)
        compile_for_h100(decode_kernel, arguments | heads_of(num_heads, share, decode), decode)
        if name == "shared":
            continue
        own = arguments | heads_of(num_heads, share, prefill)
        for by_split in (False, True):
            compile_for_h100(prefill_kernel, own, prefill | {"BY_SPLIT": by_split})
        merge = tuned("merge_attention", "*", width=width) | {"HEADS": num_heads}
        compile_for_h100(merge_kernel, arguments, merge)


def heads_of(num_heads, share, launch):
    rows = launch["BLOCK_M"] // share
    return {"heads": bundles.HeadTile(*constants(num_heads, share, 1, share, rows))}


def writes(dtype, *, everything):
    tl_dtype = {"*bf16": tl.bfloat16, "*fp32": tl.float32, "*fp16": tl.float16}[dtype]
    heads = HeadWidths(*constants(32, 8, 128, 128, 128))
    whole = TurnedPairs(*constants(0, 64, 1, 64, 64, 0))
    part = TurnedPairs(*constants(0, 16, 2, 1, 16, 128))
    for kv in ("*bf16", "*i8", "*u8", "*fp32") if everything else ("*i8", "*u8"):
        scales = "*bf16" if kv in ("*i8", "*u8") else None
        types = dict.fromkeys("qkv", StridedRows(dtype, "i32")) | {"q_out": dtype, "heads": heads}
        types["cache"] = CacheSlots(kv, kv, scales, scales, "*i64")
        types["angles"] = Angles("*fp32", "*fp32")
        for pairs in (whole, part):
            launch = {"DTYPE": tl_dtype} | tuned("rope_write", "*")
            compile_for_h100(rope_write_kernel, types | {"pairs": pairs}, launch)


def draws():
    row = {"tops": "*fp64", "temperatures": "*fp64", "records": "*i32", "tokens": "*i64"}
    for z, cuts in product(("*bf16", "*fp64"), (True, False)):
        compile_for_h100(pick_kernel, row | {"z": z, "CUTS": cuts}, tuned("pick", "*"))


if __name__ == "__main__":
    everything = sys.argv[1:] == ["all"]
    for dtype in DTYPES if everything else DTYPES[:1]:
        rows(dtype, everything=everything)
        products(dtype, everything=everything)
        writes(dtype, everything=everything)
    attention(everything=everything)
    draws()
