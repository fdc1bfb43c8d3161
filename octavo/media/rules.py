"""The size and scale of images that a model reads, by its preprocessor_config.json.

Source of names, defaults and formulas: the image processors of transformers 5 that compute with
Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from octavo.api.errors import UnsupportedModel
from octavo.media.limits import refused

MAX_RATIO = 200
"""Longest side of an image that keeps its shape, by its shortest."""

FILES = ("preprocessor_config.json", "processor_config.json")

STANDARD = ((0.5,) * 3, (0.5,) * 3)
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Means and deviations of colours: of SigLIP's images, and of CLIP's."""

BILINEAR, BICUBIC = 2, 3


class PixelSize(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The changes to an image's pixels before a tower reads them."""

    side: int | None
    """Pixels of the side that every image gets; None: images keep their shape."""
    multiple: int
    """Number of pixels that heights and widths are multiples of."""
    min_pixels: int
    max_pixels: int
    """Bounds of an image that keeps its shape."""
    resample: int
    """Pillow's number of the filter by which images are scaled."""
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Scale of the numbers: (pixel * factor - mean) / std."""

    def size_of(self, height: int, width: int) -> PixelSize:
        """Returns the size that an image is scaled to."""
        if self.side is not None:
            return PixelSize(self.side, self.side)
        if max(height, width) > MAX_RATIO * min(height, width):
            raise refused(
                f"got {width:,} x {height:,} pixels, allowed is a side at most {MAX_RATIO} times"
                " the other",
                "cut the image into parts",
            )
        return scaled_size(height, width, self)


def scaled_size(height: int, width: int, rules: ImageRules) -> PixelSize:
    """Returns the nearest size of the same shape whose sides are multiples and whose area is within
    the bounds, as `smart_resize` of transformers finds it.
    """
    unit = rules.multiple
    high, wide = (round(side / unit) * unit for side in (height, width))
    if high * wide > rules.max_pixels:
        shrink = math.sqrt(height * width / rules.max_pixels)
        high, wide = (
            max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)
        )
    elif high * wide < rules.min_pixels:
        grow = math.sqrt(rules.min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return PixelSize(high, wide)


def image_rules(
    given: Mapping[str, Any], *, side: int | None, multiple: int, max_tokens: int
) -> ImageRules:
    """Reads the rules of a preprocessor_config.json; {} stands for a model without one. `side` and
    `multiple` are the tower's; an image has at most `max_tokens` tokens.
    """
    given = given.get("image_processor", given)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if given.get(name) is False:
            raise _wrong(name, False, "true")
    if given.get("do_pan_and_scan"):
        raise _wrong("do_pan_and_scan", True, "false")
    size = given.get("size") or {}
    mean, std = STANDARD if side is not None else CLIP
    if side is not None and size and {size.get("height"), size.get("width")} != {side}:
        raise _wrong("size", size, f"the {side} pixels of the tower's images")
    low = given.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    high = given.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return ImageRules(
        side=side,
        multiple=multiple,
        min_pixels=_number("min_pixels", low),
        max_pixels=min(_number("max_pixels", high), max_tokens * multiple**2),
        resample=given.get("resample", BICUBIC if side is None else BILINEAR),
        factor=float(given.get("rescale_factor", 1 / 255)),
        mean=_colours("image_mean", given.get("image_mean") or mean),
        std=_colours("image_std", given.get("image_std") or std),
    )


def rules_file(path: Path) -> Path | None:
    """Returns the file of a checkpoint's folder that has the rules; None where there is none."""
    return next((path / name for name in FILES if (path / name).is_file()), None)


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "a whole number above 0")
    return value


def _colours(name: str, value: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise _wrong(name, value, "three numbers")
    return tuple(map(float, value))


def _wrong(name: str, value: object, allowed: str) -> UnsupportedModel:
    return UnsupportedModel(f"preprocessor_config.json: {name} is {value!r}, allowed is {allowed}")
