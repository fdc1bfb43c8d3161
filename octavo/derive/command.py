"""`octavo derive MODEL`: derive a model's Program from transformers' modelling code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def derive(
    *,
    model: Annotated[
        str,
        typer.Argument(help="Path (config.json suffices) or Hugging Face repository"),
    ],
) -> None:
    """Derive, check and store a model's Program from transformers' code. Commands that load the
    model do this on first use.
    """
    from octavo.checkpoint.catalogue import resolve_header
    from octavo.checkpoint.open import open_header
    from octavo.derive.model_hooks import check_packages

    config = open_header(resolve_header(model)).config
    check_packages(str(config.get("model_type")))
    from octavo.derive.derive import derive as derive_program
    from octavo.derive.derive import store

    program = derive_program(config, lambda line: print(line, file=sys.stderr))
    path = store(program, config)
    print(f"{path}: {len(program.ops)} ops, {len(program.weights)} weights")
