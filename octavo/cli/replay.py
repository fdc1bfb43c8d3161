"""`octavo replay FILE`: repeats the steps of a recording and reports whether they are the same.

The scheduler is a new one; times and results are the recorded ones. With --execute the model
computes the plans too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import ConfigError

MAX_DIFFERENCES = 10


def replay(
    *,
    file: Annotated[Path, typer.Argument(help="What --record has written.", show_default=False)],
    execute: Annotated[
        bool,
        typer.Option(
            "--execute", help="Load the model, compute each plan, and compare what it yields."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="With --execute: where the model is now, if not where it was."),
    ] = None,
) -> None:
    """Repeat the exact step sequence of a recording (`--record FILE`). The exit code is 1 if
    anything differs.
    """
    from octavo.engine.recording.recorder import read_log
    from octavo.engine.recording.replay import Replay
    from octavo.wiring.engine import build_executor, stop_texts_of

    if model is not None and not execute:
        raise ConfigError(
            f"model: got {model!r}, allowed only with --execute: the plans alone need none"
        )
    header, events = read_log(file)
    executor = (
        build_executor(header, model=model, report=lambda text: print(text, file=sys.stderr))
        if execute
        else None
    )
    try:
        found = Replay(header, executor, stop_texts_of(header, model=model)).run(
            events, max_differences=MAX_DIFFERENCES
        )
    finally:
        if executor is not None:
            executor.close()
    print(
        f"{found.num_steps:,} steps, {found.num_requests:,} requests, {found.num_tokens:,} tokens"
    )
    if found.unfinished_step is not None:
        print(
            f"the recording ends within step {found.unfinished_step}: its plan is there, its result"
            " is not"
        )
    for text in found.differences:
        print(text)
    if found.differences:
        print(f"not the same: {len(found.differences)} found, then it was ended")
        raise typer.Exit(1)
    print("every plan and every result is the same" if execute else "every plan is the same")
