"""The formats that a `quantization_config` may name, and their readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.api.errors import shown
from octavo.checkpoint.formats.awq import Awq
from octavo.checkpoint.formats.bitsandbytes import Bitsandbytes
from octavo.checkpoint.formats.compressed_tensors import CompressedTensors
from octavo.checkpoint.formats.format import QuantizedFormat
from octavo.checkpoint.formats.fp8 import Fp8
from octavo.checkpoint.formats.gptq import Gptq
from octavo.checkpoint.formats.mxfp4 import Mxfp4
from octavo.checkpoint.formats.options import quantization_error
from octavo.checkpoint.json_file import read_json

READERS: dict[str, Callable[[Mapping[str, Any]], QuantizedFormat]] = {
    "awq": Awq,
    "bitsandbytes": Bitsandbytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that older packages write in place of `quantization_config`, and their methods."""
OLDER_KEY = "compression_config"


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the config with `quantization_config` filled in from an older key or a
    separate file.
    """
    if config.get("quantization_config") is not None:
        return config
    older = config.get(OLDER_KEY)
    if isinstance(older, dict):
        rest = {key: value for key, value in config.items() if key != OLDER_KEY}
        return rest | {"quantization_config": {"quant_method": "compressed-tensors", **older}}
    for name, method in OLDER_FILES.items():
        if (folder / name).exists():
            quantization = {"quant_method": method, **read_json(folder / name)}
            return config | {"quantization_config": quantization}
    return config


def quantized_format(config: Mapping[str, Any]) -> QuantizedFormat | None:
    """Returns the reader for the config's quantization; None if there is none.

    Raises UnsupportedModel if the format or one of its options is not supported.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        supported = ", ".join(map(repr, READERS))
        raise quantization_error(f"quant_method is {shown(method)}, supported: {supported}")
    return reader(quantization)
