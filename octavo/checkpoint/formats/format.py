"""The interface of quantized formats, and helpers to read their tensors.

A matrix has the name it would have without quantization, "...weight", and is stored as several
tensors of its module, e.g. "qweight" and "scales". A format interprets the tensors; the checkpoint
locates them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.quant.packed import PackedWeight

Tensors = Mapping[str, NDArray]
"""A module's tensors by the suffixes of their names, as views of the files."""


WORDS = ("int32", "uint32")
FLOATS = ("float16", "bfloat16", "float32")
INDICES = ("int32", "int64")


class Described(NamedTuple):
    """Shape and format of a matrix, known without reading its codes."""

    shape: tuple[int, ...]
    format_name: str


class QuantizedFormat(Protocol):
    """Reader of the matrices of one format.

    Methods raise WeightMismatch if tensors are inconsistent with each other or with the config, and
    UnsupportedModel for unsupported options.
    """

    joint: str
    """Separator between a module and the rest of a tensor's name."""
    matrix: str
    """Suffix of a matrix's name after its module."""

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        """Returns the tensor suffixes of each quantized module among `names`."""
        ...

    def describe(self, module: str, tensors: Tensors) -> Described: ...

    def weight(self, module: str, tensors: Tensors) -> PackedWeight: ...

    def planned_name(self, module: str) -> str | None:
        """Returns the format name expected for a module's matrix, from the config alone; None if it
        is not quantized.
        """
        ...


class ByModule:
    """Usual tensor names: "module.qweight" and the like form the matrix "module.weight"."""

    joint = "."
    matrix = ".weight"


@contextmanager
def prefix_errors(source: Path | str) -> Iterator[None]:
    """Prefixes error messages of a format with the files being read."""
    try:
        yield
    except (WeightMismatch, UnsupportedModel) as error:
        raise type(error)(f"{source}: {error.message}", hint=error.hint) from None


def modules_with(
    names: Collection[str], main: str, others: Collection[str], joint: str = ByModule.joint
) -> dict[str, list[str]]:
    """Returns, for each module with the tensor `main`, which of `main` and `others` exist."""
    known = set(names)
    ending = f"{joint}{main}"
    modules = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return {
        module: [main, *(rest for rest in others if f"{module}{joint}{rest}" in known)]
        for module in modules
    }


def get_required(tensors: Tensors, rest: str, module: str) -> NDArray:
    """Returns a required tensor; raises WeightMismatch if it is missing."""
    tensor = tensors.get(rest)
    if tensor is None:
        raise WeightMismatch(
            f"{module}: {rest} is missing, found only {', '.join(sorted(tensors))}",
            hint="download the files again, or use another copy of the model",
        )
    return tensor


def check_type(tensor: NDArray, allowed: Collection[str], rest: str, module: str) -> None:
    """Raises WeightMismatch if a tensor does not have an allowed dtype."""
    if tensor.dtype.name not in allowed:
        raise WeightMismatch(
            f"{module}.{rest} is {tensor.dtype.name}, expected {' or '.join(allowed)}",
            hint="download the files again, or use another copy of the model",
        )


def check_shape(
    tensor: NDArray, expected: tuple[int, ...], rest: str, module: str, why: str
) -> None:
    """Raises WeightMismatch if a tensor does not have the expected shape."""
    if tensor.shape != expected:
        raise WeightMismatch(
            f"{module}.{rest} has shape {tensor.shape}, expected {expected}: {why}",
            hint="quantization_config and the weights belong to different models, or the file is"
            " damaged",
        )
