"""Machine code of Triton's kernels on an H100, compiled and disassembled without one:
`python -m tests.executor.torch.triton.sass [names]` prints one line of JSON for each kernel.

Runs in a process in which Triton does not interpret. Arrays and row widths are multiples of 16, as
in a real model, so that loads are as wide as they are there.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton

from octavo.executor.torch.triton.decode import decode_kernel
from octavo.executor.torch.triton.packed_linear import packed_linear_kernel
from octavo.executor.torch.triton.prefill import prefill_kernel
from octavo.executor.torch.triton.tuning import tuned
from tests.executor.torch.triton.compile_kernels import (
    PACKED,
    call_of,
    compile_for_h100,
    heads_of,
    matrix,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = ("row_bytes", "x_stride", "num_groups", "num_outputs", "row_stride", "head_stride")

Q4_1 = matrix("*u8", "*fp16", nibbles=True, half=16, mins="*fp16")
BY_128 = matrix("*u8", "*fp16", nibbles=True, half=64, unit=64, mins="*fp16")
PRODUCTS = {
    "Q4_0": (PACKED["Q4_0"], 4, 32),
    "Q4_1": (Q4_1, 4, 32),
    "Q4_K": (PACKED["Q4_K"], 4, 32),
    "groups of 128": (BY_128, 4, 128),
    "Q6_K": (PACKED["Q6_K"], 6, 16),
    "int8": (PACKED["int8"], 8, 4096),
}


def product(name, tile_rows):
    """Compiles a packed matmul; returns it and the weights that a lane of a tile multiplies."""
    weight, bits, group = PRODUCTS[name]
    launch = tuned("packed_linear", "sm_90", bits=bits, group=group)
    arguments = {"x": "*bf16", "bias": None, "out": "*bf16", "matrix": weight}
    arguments |= {"sums": "*fp32", "arrivals": "*i32"}
    made = compile_for_h100(
        packed_linear_kernel, arguments, launch | {"BLOCK_M": tile_rows}, ALIGNED
    )
    weights = launch["BLOCK_N"] * launch["BLOCK_B"] * (2 if bits == 4 else 1)
    return made, weights / (32 * launch["num_warps"])


def attention(kernel, name, kv):
    """Compiles an attention kernel of 8 KV heads of 128; returns it and the keys of a block."""
    stored = {"int8": "*i8", "float8_e4m3fn": "*u8"}.get(kv, "*bf16")
    scales = None if stored == "*bf16" else "*bf16"
    arguments, (num_heads, share) = call_of(kv=stored, scales=scales)
    launch = tuned(name, "sm_90", width=128, group=share, kv=kv)
    arguments |= heads_of(num_heads, share, launch)
    if kernel is prefill_kernel:
        arguments["BY_SPLIT"] = False
    return compile_for_h100(kernel, arguments, launch, ALIGNED), launch["BLOCK_N"]


KERNELS = {
    **{
        f"{name}, {rows} rows": (lambda name=name, rows=rows: product(name, rows))
        for name in PRODUCTS
        for rows in (8, 16)
    },
    "decode bf16": lambda: attention(decode_kernel, "decode_attention", "bfloat16"),
    "decode int8": lambda: attention(decode_kernel, "decode_attention", "int8"),
    "decode fp8": lambda: attention(decode_kernel, "decode_attention", "float8_e4m3fn"),
    "prefill bf16": lambda: attention(prefill_kernel, "prefill_attention", "bfloat16"),
}


def disassembled(made):
    """Returns a kernel's instructions, and the position of each label among them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1].strip())
    return instructions, labels, int(re.search(r"REG:(\d+)", usage)[1])


def hot_loop(instructions, labels):
    """Returns the instructions of the loop with the most matmuls for each of its instructions:
    names without predicates and modifiers.
    """
    loops = []
    for at, instruction in enumerate(instructions):
        jump = re.search(r"\bBRA.*?`\((\.L\w+)\)", instruction)
        if jump and labels.get(jump[1], at + 1) <= at:
            body = instructions[labels[jump[1]] : at + 1]
            loops.append([re.sub(r"^@!?U?P\w+\s+", "", one).split()[0] for one in body])
    is_matmul = re.compile("[HI]?G?MMA").match
    return max(loops, key=lambda loop: sum(map(bool, map(is_matmul, loop))) / len(loop))


def report(name):
    made, per_tile = KERNELS[name]()
    instructions, labels, registers = disassembled(made)
    loop = hot_loop(instructions, labels)
    kinds = Counter(one.split(".")[0] for one in loop)
    return {
        "kernel": name,
        "registers": registers,
        "shared": made.metadata.shared,
        "instructions": len(loop),
        "each": round(len(loop) / per_tile, 2),
        "spills": kinds["LDL"] + kinds["STL"],
        "most": dict(kinds.most_common(12)),
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or KERNELS:
        print(json.dumps(report(name)), flush=True)
