"""Derives the Program of a config, checks it, and stores it for the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.api.errors import UnsupportedModel
from octavo.derive.attention import find_own_masks
from octavo.derive.capture import AttentionMask, capture, reject
from octavo.derive.lower import ProgramLowering
from octavo.derive.verify import (
    layer_kinds,
    num_layers,
    num_layers_with_each_kind,
    shorten_windows,
    shrink,
    verify,
    windows,
)
from octavo.models.derived import program_path
from octavo.program.program import Program
from octavo.program.serialize import to_json
from octavo.worker.machine import Machine

LONG = 211
"""Tokens of the text on which masks that a model makes itself are tested."""

MAX_OWN_WINDOW = 512
"""Largest window that is identified in masks that a model makes itself."""

VERSION = 3
"""Version of this package's derivation; stored with each Program."""


def lower(config: Mapping[str, Any]) -> Program:
    """Returns the Program of a config, unchecked."""
    captured = capture(config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # regions are evaluated in float64
    try:
        lowering = ProgramLowering(captured, config)
        program = lowering.program()
        if not lowering.has_own_attention:
            return program
        masks = _own_masks(config, captured.max_positions)
        if all(mask.kind == "causal" for mask in masks):
            return program
        return ProgramLowering(captured, config, masks).program()
    finally:
        torch.set_default_dtype(default)


def _own_masks(config: Mapping[str, Any], max_positions: int) -> list[AttentionMask]:
    """Returns the masks that a model makes itself, tested on a text longer than its windows; larger
    windows than MAX_OWN_WINDOW are rejected.
    """
    shortened = shorten_windows(config, MAX_OWN_WINDOW + 1)
    count = max(LONG, 2 * max(windows(shortened), default=0) + 7)
    masks = find_own_masks(capture(shortened, min(count, max_positions or count)))
    known = {size for size in windows(config) if size <= MAX_OWN_WINDOW}
    if masks is None or not {mask.size for mask in masks if mask.kind == "window"} <= known:
        raise reject(str(config["model_type"]), "attention does not read all earlier keys")
    return masks


def derive(config: Mapping[str, Any], report: Callable[[str], None]) -> Program:
    """Returns the checked Program of a config.

    Raises UnsupportedModel if the model computes something that Programs cannot express, or if the
    Program's logits differ from transformers'.
    """
    model_type = str(config.get("model_type"))
    report(f"deriving {model_type} from transformers {transformers.__version__}")
    try:
        return _derive(config, model_type, report)
    except UnsupportedModel:
        raise
    except Exception as error:  # the model's code or sizes may fail in any way
        raise reject(model_type, f"{type(error).__name__}: {error}") from error


def _derive(config: Mapping[str, Any], model_type: str, report: Callable[[str], None]) -> Program:
    program = lower(config)
    count = num_layers_with_each_kind(program, config)
    small = shrink(config, count)
    report(f"checking {count} of {num_layers(config)} layers at full width")
    smaller = lower(small)
    if layer_kinds(smaller) != layer_kinds(program)[:count]:
        report(f"checking all {num_layers(config)} layers, which depend on how many there are")
        small = shrink(config, num_layers(config))
        smaller = lower(small)
        if layer_kinds(smaller) != layer_kinds(program):
            raise reject(model_type, "its layers depend on the size of the vocabulary or window")
    _check_memory(smaller, model_type)
    verify(smaller, small)
    return program


def store(program: Program, config: Mapping[str, Any]) -> Path:
    """Stores the Program of a config in the engine's folder of derived Programs; returns the
    file.
    """
    path = program_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = to_json({program.name: program}) | {
        "model_type": config["model_type"],
        "transformers": transformers.__version__,
        "deriver": VERSION,
    }
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(data))
    part.replace(path)
    return path


def _check_memory(program: Program, model_type: str) -> None:
    """Rejects a model if its verification, which needs three float64 copies, does not fit into
    memory.
    """
    count = 0
    for weight in program.weights:
        size = 1
        for length in weight.shape:
            size *= length
        count += size
    needed, available = 3 * 8 * count, Machine().available_bytes()
    if available is not None and needed > available:
        raise reject(
            model_type,
            f"its check needs {needed / 2**30:.0f} GiB of memory, available are"
            f" {available / 2**30:.0f} GiB",
        )
