"""`octavo quantize MODEL -o DIR`: quantizes a model's weights to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.quant.making.recipe import Recipe
    from octavo.tools.quantize import Quantized

SHOWN_NAMES = 8


def quantize(
    model: Annotated[
        str, typer.Argument(help="Short name, Hugging Face repository or local path.")
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Write the model to this new directory", file_okay=False
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="Quantize with rtn, gptq, awq or smoothquant",
            show_default="from --calibration",
        ),
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="Write gptq, awq, gguf or compressed-tensors")
    ] = "compressed-tensors",
    bits: Annotated[
        int | None, typer.Option(help="Use N bits per weight", show_default="from --scheme, else 4")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            help="Use N inputs per scale (-1: all)",
            show_default="the largest possible",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="Quantize as w4a16, w8a16 or w8a8 (8-bit activations)"),
    ] = None,
    sym: Annotated[
        bool | None,
        typer.Option("--sym/--zero-point", help="Quantize symmetrically, without zero points"),
    ] = None,
    desc_act: Annotated[
        bool,
        typer.Option("--desc-act", help="Order inputs by activation size (gptq act-order)"),
    ] = False,
    damp_percent: Annotated[
        float, typer.Option(help="Dampen the Hessian by N percent of its mean diagonal (gptq)")
    ] = 5.0,
    gptaq: Annotated[
        bool,
        typer.Option(
            "--gptaq",
            help="Correct the errors of earlier layers (gptq, 2x slower)",
        ),
    ] = False,
    keep_sensitive: Annotated[
        bool,
        typer.Option(
            "--keep-sensitive", help="Keep value and half of the down projections at 8 bits"
        ),
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Calibrate with this text", dir_okay=False),
    ] = None,
    calibration_texts: Annotated[int, typer.Option(help="Use N samples of the text", min=1)] = 32,
    calibration_length: Annotated[int, typer.Option(help="Use samples of N tokens", min=16)] = 512,
    tokenizer: Annotated[str | None, typer.Option(help="Use the tokenizer of this model")] = None,
) -> None:
    """Quantize a model layer by layer. An interrupted run resumes where it stopped."""
    from octavo.tools.quantize import CalibrationText, quantize_model
    from octavo.utils.progress import to_stderr

    if method is None:
        method = "rtn" if calibration is None else "gptq"
        if calibration is None:
            to_stderr(
                "using round-to-nearest (rtn); for higher accuracy use gptq with --calibration TEXT"
            )
    recipe = make_recipe(
        method=method,
        output_format=output_format,
        bits=bits,
        group=group,
        scheme=scheme,
        sym=sym,
        desc_act=desc_act,
        damp_percent=damp_percent,
        keep_sensitive=keep_sensitive,
        gptaq=gptaq,
    )
    if sym is False and not recipe.has_zeros:
        raise ConfigError(
            f"zero-point: {recipe.output_format} of {recipe.bits} bits has no zero points per"
            f" group",
            hint="remove it, or use fewer --bits",
        )
    texts = (
        None
        if calibration is None
        else CalibrationText(calibration, calibration_texts, calibration_length, tokenizer)
    )
    try:
        quantized = quantize_model(model, recipe, output, texts, to_stderr)
    except KeyboardInterrupt:
        to_stderr("interrupted; run the same command to resume")
        raise
    _print(quantized)


def make_recipe(
    *,
    method: str,
    output_format: str,
    bits: int | None,
    group: int | None,
    scheme: str | None,
    sym: bool | None,
    desc_act: bool,
    damp_percent: float,
    keep_sensitive: bool,
    gptaq: bool = False,
) -> Recipe:
    """Builds a recipe from the options; raises ConfigError for invalid ones."""
    from octavo.quant.making.recipe import METHODS, OUTPUT_FORMATS, SCHEMES, Recipe

    for name, value, allowed in (
        ("method", method, METHODS),
        ("format", output_format, OUTPUT_FORMATS),
        ("scheme", scheme, (None, *SCHEMES)),
    ):
        if value not in allowed:
            known = ", ".join(each for each in allowed if each is not None)
            raise ConfigError(f"{name}: got {value!r}, expected {known}")
    scheme_bits = None if scheme is None else {str(k): v for k, v in SCHEMES.items()}[scheme]
    if bits is not None and scheme_bits is not None and bits != scheme_bits:
        raise ConfigError(
            f"bits: got {bits}, but scheme {scheme} has {scheme_bits}", hint="omit --bits"
        )
    if group is not None and (group < -1 or group == 0):
        raise ConfigError(f"group: got {group}, expected -1 or an integer of at least 1")
    rows_are_int8 = scheme == "w8a8"
    return Recipe(
        method=method,  # type: ignore[arg-type]
        output_format=output_format,  # type: ignore[arg-type]
        bits=scheme_bits or bits or 4,
        group=0 if group == -1 or rows_are_int8 else group,
        symmetric=output_format not in {"awq", "gguf"} if sym is None else sym,
        desc_act=desc_act,
        damp_percent=damp_percent,
        rows_are_int8=rows_are_int8,
        keeps_sensitive=keep_sensitive,
        gptaq=gptaq,
    )


def _print(result: Quantized) -> None:
    share = result.num_bytes / result.source_bytes
    print(
        f"{result.output}: {result.num_matrices} matrices quantized,"
        f" {format_bytes(result.num_bytes)},"
        f" {share:.0%} of the source's {format_bytes(result.source_bytes)}"
    )
    for what, names in (
        ("stay as they are", result.left),
        ("had no calibration tokens and were rounded to nearest", result.fell_back),
    ):
        if names:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            print(f"{len(names)} {what}: {', '.join(names[:SHOWN_NAMES])}{more}")
