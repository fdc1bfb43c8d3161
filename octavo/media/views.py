"""Resizes an image for a vision tower and divides it into views, each of which the tower computes
by itself.

One function per way of resizing, in `RESIZERS`. Source of the formulas: the Pillow-based image
processors of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.media.limits import image_error
from octavo.media.rules import ImageRules, PixelSize, Resize

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200
"""Largest aspect ratio of an image that keeps its shape."""


class Views(NamedTuple):
    """Views of one image, in the order of their tokens."""

    images: list[Image]
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of tiles; (0, 0) if the image is not divided."""


def cut_views(image: Image, rules: ImageRules) -> Views:
    return RESIZERS[rules.resize](image, rules)


def _by_area(image: Image, rules: ImageRules) -> Views:
    """Keeps the shape within limits of the area, as Qwen2-VL."""
    _check_ratio(image)
    return Views([resized(image, area_size(image.height, image.width, rules), rules)])


def area_size(height: int, width: int, rules: ImageRules) -> PixelSize:
    """Returns the nearest size of the same shape with sides that are multiples and an area within
    limits, like `smart_resize` of transformers.
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


def _by_longest_edge(image: Image, rules: ImageRules) -> Views:
    """Keeps the shape within limits of the longest edge and the area, and rounds both sides up, as
    Pixtral.
    """
    _check_ratio(image)
    height, width, unit = image.height, image.width, rules.multiple
    ratio = max(height, width) / rules.edge
    if ratio > 1:
        height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
    high, wide = (math.ceil(side / unit) * unit for side in (height, width))
    if high * wide > rules.max_pixels:
        high, wide = area_size(height, width, rules)
    return Views([resized(image, PixelSize(high, wide), rules)])


def _to_square(image: Image, rules: ImageRules) -> Views:
    """Scales to a fixed size, as SigLIP's processor; or scales the shortest edge and crops the
    center, as CLIP's.
    """
    assert rules.side is not None, "towers of fixed size have a side"
    if not rules.edge:
        return Views([resized(image, PixelSize(rules.side, rules.side), rules)])
    short, long = sorted((image.height, image.width))
    long = int(rules.edge * long / short)
    size = (rules.edge, long) if image.height <= image.width else (long, rules.edge)
    scaled = resized(image, PixelSize(*size), rules)
    left, top = (scaled.width - rules.side) // 2, (scaled.height - rules.side) // 2
    return Views([scaled.crop((left, top, left + rules.side, top + rules.side))])


def _check_ratio(image: Image) -> None:
    if max(image.size) > MAX_RATIO * min(image.size):
        raise image_error(
            f"got {image.width:,} x {image.height:,} pixels, expected a side at most {MAX_RATIO}"
            " times the other",
            "split the image",
        )


def resized(image: Image, size: PixelSize, rules: ImageRules) -> Image:
    resample: Any = rules.resample
    return image.resize((size.width, size.height), resample)


RESIZERS: dict[Resize, Callable[[Image, ImageRules], Views]] = {
    "area": _by_area,
    "longest_edge": _by_longest_edge,
    "square": _to_square,
}
