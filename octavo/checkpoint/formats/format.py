"""What a quantised format must tell of its matrices, and the tensors that it tells it from.

A matrix is known by the name that it has without quantisation, "...weight", and stored as several
tensors of its module, e.g. "qweight", "scales". A format reads their bytes; where they lie is the
checkpoint's business.
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
"""A module's tensors by the rest of their names, views of the files."""


WORDS = ("int32", "uint32")
FLOATS = ("float16", "bfloat16", "float32")
INDICES = ("int32", "int64")


class Described(NamedTuple):
    """A matrix as backends know it before its codes are read."""

    shape: tuple[int, ...]
    format_name: str


class QuantizedFormat(Protocol):
    """Reader of the matrices that one format quantised. Each call raises WeightMismatch where
    tensors do not fit each other or the config, UnsupportedModel where they mean what is not read.
    """

    joint: str
    """Text between a module and the rest of a tensor's name: a point, but for one format."""
    matrix: str
    """Ending of a matrix's name, behind that of its module."""

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        """Returns the tensors of each quantised module among a checkpoint's names, as the rests of
        their names.
        """
        ...

    def describe(self, module: str, tensors: Tensors) -> Described: ...

    def weight(self, module: str, tensors: Tensors) -> PackedWeight: ...

    def planned_name(self, module: str) -> str | None:
        """Returns the format name that a module's matrix probably has, from the config alone; None
        where it is not quantised.
        """
        ...


class ByModule:
    """Names of the usual kind: "module.qweight" and the like are the matrix "module.weight"."""

    joint = "."
    matrix = ".weight"


@contextmanager
def naming(place: Path | str) -> Iterator[None]:
    """Puts the files that are read before the message of a fault that a format finds in them."""
    try:
        yield
    except (WeightMismatch, UnsupportedModel) as error:
        raise type(error)(f"{place}: {error.message}", hint=error.hint) from None


def modules_with(
    names: Collection[str], main: str, others: Collection[str], joint: str = ByModule.joint
) -> dict[str, list[str]]:
    """Returns, for each module with a tensor `main`, those of its tensors `main` and `others` that
    are there.
    """
    known = set(names)
    ending = f"{joint}{main}"
    modules = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return {
        module: [main, *(rest for rest in others if f"{module}{joint}{rest}" in known)]
        for module in modules
    }


def needed(tensors: Tensors, rest: str, module: str) -> NDArray:
    """Returns a tensor without which the matrix cannot be read."""
    found = tensors.get(rest)
    if found is None:
        raise WeightMismatch(
            f"{module}: {rest} is missing beside {', '.join(sorted(tensors))}",
            hint="download the files again, or take another copy of the model",
        )
    return found


def check_type(found: NDArray, allowed: Collection[str], rest: str, module: str) -> None:
    """Raises WeightMismatch where a tensor's numbers are of another type than the format's."""
    if found.dtype.name not in allowed:
        raise WeightMismatch(
            f"{module}.{rest} is {found.dtype.name}, expected {' or '.join(allowed)}",
            hint="download the files again, or take another copy of the model",
        )


def check_shape(
    found: NDArray, expected: tuple[int, ...], rest: str, module: str, why: str
) -> None:
    """Raises WeightMismatch where a tensor has another shape than expected."""
    if found.shape != expected:
        raise WeightMismatch(
            f"{module}.{rest} has shape {found.shape}, expected {expected}: {why}",
            hint="quantization_config and the weights belong to different models, or the file is"
            " damaged",
        )
