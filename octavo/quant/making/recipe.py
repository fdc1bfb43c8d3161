"""User choices for `octavo quantize`: method, bits, groups and tuning options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.api.errors import ConfigError
from octavo.quant.making.grid import GridSpec

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
OutputFormat = Literal["gptq", "awq", "compressed-tensors", "gguf"]
Scheme = Literal["w4a16", "w8a16", "w8a8"]

METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")
OUTPUT_FORMATS: tuple[OutputFormat, ...] = ("gptq", "awq", "compressed-tensors", "gguf")
SCHEMES: dict[Scheme, int] = {"w4a16": 4, "w8a16": 8, "w8a8": 8}
BITS: dict[OutputFormat, tuple[int, ...]] = {
    "gptq": (2, 3, 4, 8),
    "awq": (4,),
    "compressed-tensors": (4, 8),
    "gguf": (4, 5, 6, 8),
}
MIN_GROUP = 16
MAX_DAMP_PERCENT = 100.0
DAMP_PERCENT = 5.0
"""Damping in percent; best or nearly best for SmolLM2's matrices, on texts similar to the
calibration texts and on others. With 1%, the error on a different kind of text is up to 8% larger.
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Validated quantization options: method, format, bits, group size.

    `group` 0 means entire rows; None means the largest common group size that divides the inputs of
    every matrix, which is set once the model is known.
    """

    method: Method
    output_format: OutputFormat
    bits: int
    group: int | None
    symmetric: bool
    desc_act: bool = False
    damp_percent: float = DAMP_PERCENT
    rows_are_int8: bool = False
    """Whether activations are quantized to 8 bits as well (w8a8)."""
    keeps_sensitive: bool = False
    """Whether the most sensitive matrices get 8 bits."""
    gptaq: bool = False
    """Whether matrices compensate for the rounding of earlier layers."""

    def __post_init__(self) -> None:
        self._check_bits()
        self._check_knobs()

    def _check_bits(self) -> None:
        allowed = BITS[self.output_format]
        if self.bits not in allowed:
            raise ConfigError(
                f"bits: got {self.bits}, expected {', '.join(map(str, allowed))} with format"
                f" {self.output_format}",
                hint="--format gptq supports 2, 3, 4 and 8 bits",
            )
        if self.group and self.group < MIN_GROUP:
            raise ConfigError(
                f"group: got {self.group}, expected at least {MIN_GROUP}, or -1 (one group per row)"
            )
        if not 0 < self.damp_percent <= MAX_DAMP_PERCENT:
            raise ConfigError(
                f"damp-percent: got {self.damp_percent}, expected a number above 0 and at most"
                f" {MAX_DAMP_PERCENT:g}"
            )

    def _check_knobs(self) -> None:
        if self.desc_act and self.method != "gptq":
            raise ConfigError(
                f"desc-act: requires method gptq, got {self.method}", hint="remove --desc-act"
            )
        # Act-order of compressed-tensors is rejected by its current package and by vLLM.
        if self.desc_act and self.output_format != "gptq":
            raise ConfigError(
                f"desc-act: {self.output_format} does not store the order of inputs",
                hint="remove it: inputs are quantized in order of activation anyway; or use"
                " --format gptq",
            )
        if self.gptaq and self.method != "gptq":
            raise ConfigError(
                f"gptaq: requires method gptq, got {self.method}", hint="remove --gptaq"
            )
        if self.rows_are_int8 and self.output_format != "compressed-tensors":
            raise ConfigError(
                f"scheme w8a8: {self.output_format} does not store how activations are quantized",
                hint="use --format compressed-tensors",
            )
        if self.method == "smoothquant" and not self.rows_are_int8:
            raise ConfigError(
                "smoothquant requires 8-bit weights and activations", hint="use --scheme w8a8"
            )
        if self.keeps_sensitive and (self.output_format == "awq" or self.bits == 8):
            raise ConfigError(
                f"keep-sensitive: {self.output_format} of {self.bits} bits does not support"
                f" matrices of mixed bit widths",
                hint="use --format gptq, compressed-tensors or gguf with fewer bits",
            )

    @property
    def needs_calibration(self) -> bool:
        return self.method != "rtn"

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zeros or minima; 8-bit formats and GGUF's 6-bit type do not."""
        is_wide = self.bits == 8 or (self.output_format == "gguf" and self.bits == 6)
        return not self.symmetric and not is_wide

    def grid(self, bits: int) -> GridSpec:
        """Returns the grid for matrices of `bits` bits; 8 bits are always symmetric."""
        symmetric = self.symmetric or bits == 8
        assert self.group is not None, "set when the model is known"
        group = 0 if self.rows_are_int8 else self.group
        if symmetric:
            return GridSpec(bits, group, "middle")
        # GPTQ's first version stores zeros minus 1 and therefore cannot represent a zero of 0.
        return GridSpec(bits, group, "zero", int(self.output_format == "gptq"))
