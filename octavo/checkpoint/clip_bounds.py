"""Bounds of the inputs and outputs of linear layers that the files of Gemma 4 contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from numpy.typing import NDArray

CLIP_BOUNDS = "clip_bounds"
"""Key that a checkpoint adds to its config: the bounds of each module that has them."""

NAMES = ("input_min", "input_max", "output_min", "output_max")


def read_clip_bounds(
    names: Iterable[str], tensor: Callable[[str], NDArray | None]
) -> dict[str, list[float]]:
    """Returns the lowest and highest input and the lowest and highest output by module, without the
    prefix `model.`; `tensor` returns the numbers of a name, None if it is missing.
    """
    bounds: dict[str, list[float]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        if last != NAMES[0]:
            continue
        numbers = [tensor(f"{module}.{each}") for each in NAMES]
        if all(each is not None and each.size == 1 for each in numbers):
            values = [float(each.reshape(-1)[0]) for each in numbers if each is not None]
            bounds[module.removeprefix("model.")] = values
    return bounds
