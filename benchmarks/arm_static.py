"""Estimates cycles per weight of the NEON kernels without an Arm machine.

Compiles the hot loops (`benchmarks/arm_static.cpp`) with Clang for a processor, disassembles them
and simulates each loop with llvm-mca, whose models have the units and latencies of the processor,
but no caches: all loads hit. With `--llama-cpp`, llama.cpp's repacked kernels are estimated in the
same way. A loop's products are counted from its instructions.

    python benchmarks/arm_static.py [--llama-cpp PATH] [--cpu neoverse-n1] [--json FILE]

Needs clang++, llvm-objdump and llvm-mca (LLVM 19 or newer; `--llvm -22` for binaries with that
suffix) and the headers of g++-aarch64-linux-gnu.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOT_PRODUCTS = "armv8.2-a+dotprod"
CPUS = {
    "neoverse-n1": DOT_PRODUCTS,
    "apple-m1": DOT_PRODUCTS,
    "neoverse-v2": DOT_PRODUCTS + "+i8mm+bf16",
}
MODELS = "+dotprod,+i8mm,+bf16,+fullfp16"
"""Extensions that llvm-mca and llvm-objdump decode."""
NUM_ROWS = 32
UNPACKED_WEIGHTS = 512
"""Weights that an iteration of an unpacking loop unpacks: 16 outputs of 32 inputs."""

MULTIPLIES = {
    **dict.fromkeys(("sdot", "udot", "usdot", "bfmmla"), 16),
    **dict.fromkeys(("smmla", "ummla", "usmmla"), 32),
    **dict.fromkeys(("smull", "smull2", "smlal", "smlal2"), 4),
    "bfdot": 8,
}
BRANCH = re.compile(r"b\.\w+|b|cbn?z|tbn?z")

FORMATS = ["q4_0", "q4_k", "q8_0", "int8"]
LLAMA_CPP = {  # format: kernels with dot products and with I8MM, and trips of their innermost loop
    "q4_0": (("q4_0_4x4_q8_0", "q4_0_4x8_q8_0"), 1),
    "q4_k": (("q4_K_8x4_q8_K", "q4_K_8x8_q8_K"), 4),
    "q8_0": (("q8_0_4x4_q8_0", "q8_0_4x8_q8_0"), 1),
}
ATTENTION = ["scores_bf16", "values_bf16", "scores_int8", "values_int8"]


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Address that a branch jumps to."""
        found = re.search(r"0x([0-9a-f]+)", self.operands.split(",")[-1])
        return int(found[1], 16) if BRANCH.fullmatch(self.name) and found else None


@dataclass(frozen=True)
class Loop:
    first: int
    last: int

    def contains(self, other: "Loop") -> bool:
        return self != other and self.first <= other.first and other.last <= self.last

    def instructions(self, function: list[Instruction]) -> list[Instruction]:
        return [each for each in function if self.first <= each.address <= self.last]


@dataclass(frozen=True)
class Estimate:
    cycles: float
    multiplies: int

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.cycles + other.cycles, self.multiplies + other.multiplies)

    def times(self, count: int) -> "Estimate":
        return Estimate(self.cycles * count, self.multiplies * count)

    @property
    def cycles_per_multiply(self) -> float:
        return self.cycles / self.multiplies


class Tools:
    """The LLVM tools, for one processor."""

    def __init__(self, suffix: str, cpu: str) -> None:
        self.suffix, self.cpu = suffix, cpu

    def run(self, name: str, *arguments: str | Path, text: str | None = None) -> str:
        command = name + self.suffix
        if shutil.which(command) is None:
            sys.exit(
                f"arm_static needs {command}, found none\nhint: apt-get install llvm-22 clang-22"
            )
        done = subprocess.run(
            [command, *arguments], check=False, input=text, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr)
        return done.stdout

    def compile(self, source: Path, to: Path, *options: str) -> dict[str, list[Instruction]]:
        """Returns the instructions of each function of a source."""
        target = ("--target=aarch64-linux-gnu", f"-march={CPUS[self.cpu]}", f"-mtune={self.cpu}")
        self.run("clang++", *target, "-O3", "-w", *options, "-c", source, "-o", to)
        text = self.run("llvm-objdump", "-d", "--no-show-raw-insn", f"--mattr={MODELS}", to)
        functions: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if found := re.match(r"[0-9a-f]+ <(.+)>:", line):
                current = functions.setdefault(found[1], [])
            elif found := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*(//.*)?$", line):
                operands = re.sub(r"\s*<[^>]*>", "", found[3])
                current.append(Instruction(int(found[1], 16), found[2], operands))
        return functions

    def cycles(self, instructions: list[Instruction]) -> float:
        """Returns the cycles of an iteration of a loop."""
        iterations = 200
        lines = [f"{i.name} {i.operands}" for i in instructions if i.target is None]
        if not lines:
            return 0
        options = (f"-mcpu={self.cpu}", f"-mattr={MODELS}", f"-iterations={iterations}")
        text = self.run("llvm-mca", "-mtriple=aarch64", *options, text="\n".join(lines))
        found = re.search(r"Total Cycles:\s+(\d+)", text)
        assert found is not None
        return int(found[1]) / iterations

    def estimate(self, instructions: list[Instruction]) -> Estimate:
        fused = sum(4 for i in instructions if i.name == "fmla")
        multiplies = sum(MULTIPLIES.get(i.name, 0) for i in instructions)
        return Estimate(self.cycles(instructions), multiplies or fused)

    def hot_loop(self, function: list[Instruction], trips: int = 1) -> Estimate:
        """Estimates the innermost loop with the most products; if others surround it, with a share
        of the loop around it, in which it runs `trips` times.
        """
        loops = [
            Loop(i.target, i.address)
            for i in function
            if i.target is not None and i.target <= i.address
        ]
        inner = [loop for loop in loops if not any(loop.contains(other) for other in loops)]
        hot = max(inner, key=lambda loop: (self._products(loop, function), loop.first - loop.last))
        found = self.estimate(hot.instructions(function))
        around = [loop for loop in loops if loop.contains(hot)]
        if trips == 1 or not around:
            return found
        outer = min(around, key=lambda loop: loop.last - loop.first)
        inside = [loop for loop in inner if outer.contains(loop)]
        rest = [
            i
            for i in outer.instructions(function)
            if not any(loop.first <= i.address <= loop.last for loop in inside)
        ]
        total = self.estimate(rest)
        for loop in inside:
            total += self.estimate(loop.instructions(function)).times(trips)
        return total

    @staticmethod
    def _products(loop: Loop, function: list[Instruction]) -> int:
        names = [i.name for i in loop.instructions(function)]
        return sum(MULTIPLIES.get(name, 0) for name in names) or names.count("fmla")


def estimate_octavo(tools: Tools, directory: Path) -> dict[str, dict[str, float]]:
    """Returns cycles per weight of one row and of 32 rows, and per product of attention."""
    options = ("-std=gnu++20", "-DOCTAVO_NEON", "-ffp-contract=off", "-fno-math-errno")
    source = ROOT / "benchmarks/arm_static.cpp"
    functions = tools.compile(source, directory / "octavo.o", *options, "-fno-trapping-math")
    found: dict[str, dict[str, float]] = {}
    for name in FORMATS:
        loop = "q4_0" if name == "q8_0" else name
        rows = tools.hot_loop(functions[f"{loop}_rows"]).cycles_per_multiply * NUM_ROWS
        if unpack := functions.get(f"{name}_unpack"):
            rows += tools.hot_loop(unpack).cycles / UNPACKED_WEIGHTS
        found[name] = {
            "1 row": tools.hot_loop(functions[f"{name}_row"]).cycles_per_multiply,
            f"{NUM_ROWS} rows": rows,
        }
    for name in ATTENTION:
        found[name] = {"1 product": tools.hot_loop(functions[name]).cycles_per_multiply}
    return found


def estimate_llama_cpp(tools: Tools, directory: Path, path: Path) -> dict[str, dict[str, float]]:
    """Returns cycles per weight of llama.cpp's kernels of the same instruction set."""
    ggml = path / "ggml"
    includes = [f"-I{ggml / folder}" for folder in ("include", "src", "src/ggml-cpu")]
    source = ggml / "src/ggml-cpu/arch/arm/repack.cpp"
    if not source.exists():
        sys.exit(f"{path}: no llama.cpp with repacked kernels ({source} is missing)")
    functions = tools.compile(source, directory / "llama.o", "-std=gnu++17", *includes)
    found = {}
    for name, (kernels, trips) in LLAMA_CPP.items():
        kernel = kernels["i8mm" in CPUS[tools.cpu]]
        code = {
            kind: functions[_symbol(functions, f"ggml_{kind}_{kernel}")]
            for kind in ("gemv", "gemm")
        }
        found[name] = {
            "1 row": tools.hot_loop(code["gemv"], trips).cycles_per_multiply,
            f"{NUM_ROWS} rows": tools.hot_loop(code["gemm"], trips).cycles_per_multiply * NUM_ROWS,
        }
    return found


def _symbol(functions: dict[str, list[Instruction]], name: str) -> str:
    return next(each for each in functions if re.search(rf"(^|\d){name}($|[^_\w]|i)", each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--llama-cpp", type=Path, help="source tree of llama.cpp to compare with")
    parser.add_argument("--cpu", choices=CPUS, action="append", help="default: all of them")
    parser.add_argument("--llvm", default="", metavar="SUFFIX", help="suffix of the LLVM tools")
    parser.add_argument("--json", type=Path, help="also write the estimates to this file")
    args = parser.parse_args()
    results = {}
    for cpu in args.cpu or CPUS:
        tools = Tools(args.llvm, cpu)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            ours = estimate_octavo(tools, directory)
            theirs = estimate_llama_cpp(tools, directory, args.llama_cpp) if args.llama_cpp else {}
        results[cpu] = {"octavo": ours, "llama.cpp": theirs}
        print(f"{cpu}\n{'':14}{'cycles per':12}{'octavo':>8}{'llama.cpp':>11}")
        for kernel, counts in ours.items():
            for unit, cycles in counts.items():
                other = theirs.get(kernel, {}).get(unit)
                shown = f"{other:11.4f}" if other else ""
                weight = "weight, " if "row" in unit else ""
                print(f"{kernel:14}{weight + unit:16}{cycles:8.4f}{shown}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
