"""The formats that a `quantization_config` may name, each with its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.checkpoint.formats.awq import Awq
from octavo.checkpoint.formats.bitsandbytes import Bitsandbytes
from octavo.checkpoint.formats.compressed_tensors import CompressedTensors
from octavo.checkpoint.formats.format import QuantizedFormat
from octavo.checkpoint.formats.fp8 import Fp8
from octavo.checkpoint.formats.gptq import Gptq
from octavo.checkpoint.formats.mxfp4 import Mxfp4
from octavo.checkpoint.formats.options import refused
from octavo.errors import shown

READERS: dict[str, Callable[[Mapping[str, Any]], QuantizedFormat]] = {
    "awq": Awq,
    "bitsandbytes": Bitsandbytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def quantized_format(config: Mapping[str, Any]) -> QuantizedFormat | None:
    """Returns the reader that config.json names; None where nothing is quantised, UnsupportedModel
    where the format or one of its options is not supported.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        supported = ", ".join(map(repr, READERS))
        raise refused(f"quant_method is {shown(method)}, supported are {supported}")
    return reader(found)
