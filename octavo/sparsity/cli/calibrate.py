"""`octavo calibrate MODEL`: measure a model's activations for the sparsity options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.common.flags import with_engine_flags
from octavo.config.option import get_options
from octavo.sparsity.options import NeuronOptions, SparsityOptions

DEFAULT_TOKENS = 4096

LEFT_OUT = (
    "model",
    "served_model_name",
    "record",
    "max_model_len",
    *get_options(SparsityOptions),
    *get_options(NeuronOptions),
)


@with_engine_flags(without=LEFT_OUT)
def calibrate(
    *,
    model: Annotated[
        str, typer.Argument(help="Short name, local path or Hugging Face repository.")
    ],
    text: Annotated[Path, typer.Option(help="Use this text file (UTF-8)")],
    out: Annotated[Path, typer.Option(help="Write the result to this file")],
    tokens: Annotated[
        int, typer.Option(min=256, help="Use at most N tokens of the text")
    ] = DEFAULT_TOKENS,
    predictor_rank: Annotated[
        int,
        typer.Option(
            min=0,
            help="Fit predictors of rank N, e.g. 64 with 16384 tokens",
        ),
    ] = 0,
    options: dict[str, Any],
) -> None:
    """Measure activations of a model for the sparsity options. These are
    --activation-sparsity, --ffn-sparsity gate:SHARE, --sparsity-predictor and --hot-neurons.
    """
    from octavo.config.engine_config import EngineConfig
    from octavo.sparsity.calibrate import calibrate_model, describe_recall, read_text

    config = EngineConfig.from_options(**options, model=model)
    calibration = calibrate_model(
        config,
        read_text(text),
        num_tokens=tokens,
        predictor_rank=predictor_rank,
        report=lambda line: print(line, file=sys.stderr),
    )
    calibration.save(out)
    print(
        f"{out}: {len(calibration.inputs)} matmul inputs and {len(calibration.gates)} gates, from"
        f" {calibration.num_tokens} tokens"
    )
    for line in describe_recall(calibration):
        print(f"  {line}")
