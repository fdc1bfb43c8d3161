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

PROMPT = "The capital of France is"
NUM_TOKENS = 16
PACKAGE = str(Path(octavo.__file__).parent)
STEP = "EngineCore.step"
"""Qualified name of the function from which frames are counted."""
NATIVE = "octavo.backends.native._native"


class PathProfile:
    """What a profiler sees of one thread's calls, and of those of threads that it starts."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.deepest: list[str] = []
        """Frames from `EngineCore.step` to the deepest native call that runs a step."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[frame.f_code] += 1
        elif event == "c_call" and _runs_a_step(argument):
            between = _frames_below_step(frame)
            if len(between) > len(self.deepest):
                self.deepest = between


def _runs_a_step(function: Any) -> bool:
    owner = type(getattr(function, "__self__", None))
    module = getattr(function, "__module__", None) or owner.__module__
    return module == NATIVE and getattr(function, "__name__", "") in {"run", "decode", "step"}


def _frames_below_step(frame: FrameType | None) -> list[str]:
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_qualname == STEP:
            return names[::-1]
        names.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}")
        frame = frame.f_back
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--list", action="store_true", help="list each function with its calls")
    options = parser.parse_args()
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
            path = Path(code.co_filename).relative_to(PACKAGE)
            print(f"{count:6d}  {path}:{code.co_qualname}")


if __name__ == "__main__":
    main()
