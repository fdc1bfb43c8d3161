"""Counts what Python does for one request: distinct functions and files of octavo, Python calls per
token, and frames between `EngineCore.step` and the native call.

    python -P benchmarks/request_path.py [--model smollm2] [--list]

An offline request of 16 greedy tokens runs once to warm up, then once under `sys.setprofile`.
Counts, unlike seconds, are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import octavo
from octavo import LLM, SamplingParams
from octavo.engine.scheduler import step_builder

PROMPT = "The capital of France is"
NUM_TOKENS = 16
PACKAGE = Path(octavo.__file__).parent
STEP = "EngineCore.step"
"""Qualified name of the function from which frames are counted."""
LAST = {"NativeProgram.run", "NativeProgram.decode"}
"""Functions that make the native calls of a step."""


class PathProfile:
    """Counts calls of Octavo's functions in the threads that it profiles."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.deepest: list[str] = []
        """Frames from `EngineCore.step` to the function that calls the native code."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        self.calls[frame.f_code] += 1
        if frame.f_code.co_qualname in LAST:
            between = _frames_below_step(frame)
            if len(between) > len(self.deepest):
                self.deepest = between


def _file_of(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


def _frames_below_step(frame: FrameType | None) -> list[str]:
    """Returns the functions called since `EngineCore.step`, outermost first; [] outside of it."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code.co_qualname == STEP:
            return [name for name in names[::-1] if "<" not in name]
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            names.append(f"{_file_of(frame.f_code)}: {frame.f_code.co_qualname}")
        frame = frame.f_back
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--list", action="store_true", help="list each function with its calls")
    options = parser.parse_args()
    # However slow the machine is, plans hold as many decode steps as on a fast one.
    step_builder.MAX_CALL_S = 1e9
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(options.model, max_model_len=1024) as llm:
        llm.generate(PROMPT, params)
        profile = PathProfile()
        threading.setprofile(profile)
        sys.setprofile(profile)
        (output,) = llm.generate(PROMPT, params)
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    num_tokens = len(output.outputs[0].token_ids)
    files = {code.co_filename for code in profile.calls}
    total = sum(profile.calls.values())
    print(f"distinct functions        {len(profile.calls)}")
    print(f"files                     {len(files)}")
    print(f"Python calls              {total}, {total / num_tokens:.1f} per token")
    print(f"frames, step to native    {len(profile.deepest)}")
    for name in profile.deepest:
        print(f"    {name}")
    if options.list:
        for code, count in profile.calls.most_common():
            print(f"{count:6d}  {_file_of(code)}: {code.co_qualname}")


if __name__ == "__main__":
    main()
