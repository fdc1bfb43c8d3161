"""`octavo simulate`: estimate how a model would perform on hardware that is not available."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.common.command import Command, Group
from octavo.cli.common.flags import with_engine_flags
from octavo.sparsity.cli.calibrate import LEFT_OUT

SKEWS = (0.0, 0.25, 0.5)
"""Fractions of the active neurons that are identical for every token."""

RATES = (0.5, 1.0, 2.0)
"""Multiples of the modules' rate to simulate."""


def build_app() -> typer.Typer:
    app = typer.Typer(cls=Group, help="Simulate hardware.", rich_markup_mode=None)
    app.callback()(_simulate)
    app.command("ndp", cls=Command)(ndp)
    return app


def _simulate() -> None:
    """Simulate hardware."""


@with_engine_flags(without=LEFT_OUT)
def ndp(
    *,
    model: Annotated[
        str, typer.Argument(help="Short name, local path or Hugging Face repository.")
    ],
    text: Annotated[Path, typer.Option(help="Use this text to record active neurons")],
    tokens: Annotated[int, typer.Option(min=256, help="Use at most N tokens of the text")] = 512,
    active: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Assume this fraction of active neurons per layer"),
    ] = 0.2,
    hot: Annotated[
        float, typer.Option(min=0.0, max=0.95, help="Keep this fraction of neurons on the host")
    ] = 0.1,
    window: Annotated[int, typer.Option(min=1, help="Redistribute neurons every N tokens")] = 32,
    modules: Annotated[int, typer.Option(min=1, max=1024, help="Simulate N memory modules")] = 8,
    module_rate: Annotated[
        str, typer.Option(help="Assume N bytes/s of compute per module")
    ] = "20G",
    host_rate: Annotated[
        str, typer.Option(help="Assume N bytes/s of compute on the host")
    ] = "500G",
    link_rate: Annotated[str, typer.Option(help="Assume N bytes/s between modules")] = "25G",
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Simulate near-data processing: memory modules compute feed-forward layers. Neurons are
    distributed round-robin and redistributed after each window of tokens. Nothing is measured on
    such a machine.
    """
    from octavo.config.engine_config import EngineConfig
    from octavo.config.sizes import parse_rate
    from octavo.sparsity.calibrate import read_text
    from octavo.sparsity.ndp_simulation import NdpMachine, simulate, skewed
    from octavo.sparsity.neuron_trace import record_neurons

    machine = NdpMachine(
        modules,
        parse_rate(module_rate, name="module_rate"),
        parse_rate(host_rate, name="host_rate"),
        parse_rate(link_rate, name="link_rate"),
    )
    trace = record_neurons(
        EngineConfig.from_options(**options, model=model),
        read_text(text),
        num_tokens=tokens,
        share=active,
        report=lambda line: print(line, file=sys.stderr),
    )
    neuron_bytes = 3 * trace.inputs  # a gate row, an up row and a down column of one byte each
    rows = []
    for skew in SKEWS:
        changed = skewed(trace.tokens, skew)
        for rate in RATES:
            faster = NdpMachine(
                modules, rate * machine.module_rate, machine.host_rate, machine.link_rate
            )
            for every in (0, window):
                result = simulate(
                    changed,
                    faster,
                    num_neurons=trace.num_neurons,
                    neuron_bytes=neuron_bytes,
                    hot_share=hot,
                    hot_tokens=window,
                    window=every,
                )
                rows.append(
                    {"skew": skew, "rate": rate, "window": every, **asdict(result)}
                    | {"tokens_per_s": len(changed) / result.seconds}
                )
    if json:
        import json as json_format

        print(json_format.dumps({"simulation": rows, "tokens": len(trace.tokens)}))
        return
    print(
        f"simulation, nothing measured: the feed-forward layers of {model} in int8,"
        f" {len(trace.tokens)} tokens, {modules} modules"
    )
    print(f"{'skew':>6}{'rate':>7}{'window':>8}{'tokens/s':>11}{'balance':>9}{'moved':>12}")
    for row in rows:
        print(
            f"{row['skew']:>6.0%}{row['rate']:>6.1f}x{row['window'] or 'none':>8}"
            f"{row['tokens_per_s']:>11.1f}{row['balance']:>9.0%}{row['moved_bytes']:>12,}"
        )
