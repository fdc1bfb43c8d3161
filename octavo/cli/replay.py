"""`octavo replay FILE`: repeats the steps of a recording and reports differences.

The current scheduler is used; times and results come from the recording. --execute also runs the
model, --serve shows the steps in a browser.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.api.errors import ConfigError

MAX_DIFFERENCES = 10
HOST = "127.0.0.1"
PORT = 8000
MAX_STEPS = 20_000


def replay(
    *,
    file: Annotated[Path, typer.Argument(help="File written by --record", show_default=False)],
    execute: Annotated[
        bool,
        typer.Option("--execute", help="Load the model and compare the results of each step"),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Load the model from this path", show_default="as recorded"),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Show the steps in a browser"),
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="Bind to this address", show_default=HOST)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Listen on this port (0: any free port)", show_default=str(PORT)
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Show at most N steps", show_default=str(MAX_STEPS)),
    ] = None,
) -> None:
    """Replay the steps of a recording (`--record FILE`) and compare them. The exit code is 1 if
    anything differs.
    """
    from octavo.engine.recording.recorder import read_log
    from octavo.engine.recording.replay import Replay
    from octavo.wiring.engine import build_executor, make_stop_texts

    if model is not None and not (execute or serve):
        raise ConfigError(
            f"model: got {model!r}, requires --execute or --serve",
            hint="remove it: replaying plans alone loads no model",
        )
    if serve:
        if execute:
            raise ConfigError(
                "serve: not supported with --execute", hint="--serve shows the recorded results"
            )
        _show(file, model, host or HOST, PORT if port is None else port, max_steps or MAX_STEPS)
        return
    for name, value in (("host", host), ("port", port), ("max_steps", max_steps)):
        if value is not None:
            raise ConfigError(f"{name}: got {value!r}, requires --serve")
    header, events = read_log(file)
    executor = (
        build_executor(header, model=model, report=lambda text: print(text, file=sys.stderr))
        if execute
        else None
    )
    try:
        report = Replay(header, executor, make_stop_texts(header, model=model)).run(
            events, max_differences=MAX_DIFFERENCES
        )
    finally:
        if executor is not None:
            executor.close()
    print(
        f"{report.num_steps:,} steps, {report.num_requests:,} requests,"
        f" {report.num_tokens:,} tokens"
    )
    if report.unfinished_step is not None:
        print(
            f"the recording ends within step {report.unfinished_step}, which has a plan but no"
            f" result"
        )
    for text in report.differences:
        print(text)
    if report.differences:
        print(f"not the same: {len(report.differences)} found, then it was ended")
        raise typer.Exit(1)
    print("every plan and every result is the same" if execute else "every plan is the same")


def _show(file: Path, model: str | None, host: str, port: int, max_steps: int) -> None:
    """Serves the recording's page until Ctrl-C."""
    from octavo.engine.recording.frames import RecordedFrames
    from octavo.engine.recording.recorder import read_log
    from octavo.server.recording_app import serve_recording
    from octavo.server.state.shown_recording import FRAMES_IN_CHUNK, ShownRecording
    from octavo.wiring.engine import make_stop_texts

    header, events = read_log(file)
    frames = RecordedFrames(
        header, events, make_stop_texts(header, model=model), num_in_chunk=FRAMES_IN_CHUNK
    )
    serve_recording(ShownRecording(file.name, frames, max_frames=max_steps), host, port)
