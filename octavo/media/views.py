"""Resizes an image for a vision tower and divides it into views, each of which the tower computes
by itself.

One function per way of resizing, in `RESIZERS`. Source of the formulas: the Pillow-based image
processors of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.media.limits import image_error
from octavo.media.rules import ImageRules, PixelSize, Resize

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200
"""Largest aspect ratio of an image that keeps its shape."""

MAX_EDGE = 4096
"""Longest edge of an image that is divided into tiles, in pixels."""


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


def _by_budget(image: Image, rules: ImageRules) -> Views:
    """Scales to the largest area of the same shape within the limit, as Gemma 4."""
    _check_ratio(image)
    return Views([resized(image, budget_size(image.height, image.width, rules), rules)])


def budget_size(height: int, width: int, rules: ImageRules) -> PixelSize:
    """Returns the largest size of the same shape within the area limit, with both sides rounded
    down to multiples.
    """
    unit = rules.multiple
    factor = math.sqrt(rules.max_pixels / (height * width))
    high, wide = (math.floor(factor * side / unit) * unit for side in (height, width))
    longest = rules.max_pixels // unit
    if high == 0:
        high, wide = unit, min(width // height * unit, longest)
    elif wide == 0:
        high, wide = min(height // width * unit, longest), unit
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


def _to_tiles(image: Image, rules: ImageRules) -> Views:
    """Scales the longest edge, rounds both sides up to multiples of a tile and cuts tiles, followed
    by a view of the entire image, as Idefics 3.
    """
    assert rules.side is not None, "tiles have a side"
    side, square = rules.side, PixelSize(rules.side, rules.side)
    _check_ratio(image)
    image = resized(image, _edge_size(image, min(rules.edge, MAX_EDGE)), rules)
    if rules.num_tiles[1] == 1:
        return Views([resized(image, square, rules)])
    ratio = image.width / image.height
    if image.width >= image.height:
        width = math.ceil(image.width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(image.height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    image = resized(image, PixelSize(height, width), rules)
    if (height, width) == square:
        return Views([image])
    tiles = _cut(image, height // side, width // side, side)
    return Views([*tiles, resized(image, square, rules)], (height // side, width // side))


def _edge_size(image: Image, edge: int) -> PixelSize:
    """Returns the size of the same shape with this longest edge; the other one is even."""
    ratio = image.width / image.height
    if image.width >= image.height:
        height = int(edge / ratio)
        return PixelSize(max(1, height + height % 2), edge)
    width = int(edge * ratio)
    return PixelSize(edge, max(1, width + width % 2))


def _to_best_tiles(image: Image, rules: ImageRules) -> Views:
    """Divides an image into the grid of tiles whose shape is nearest, followed by a view of the
    entire image, as InternVL.
    """
    assert rules.side is not None, "tiles have a side"
    side, square = rules.side, PixelSize(rules.side, rules.side)
    if rules.num_tiles[1] == 1:
        return Views([resized(image, square, rules)])
    rows, columns = _best_grid(image, rules)
    scaled = resized(image, PixelSize(rows * side, columns * side), rules)
    if rows * columns == 1:
        return Views([scaled])
    tiles = _cut(scaled, rows, columns, side)
    return Views([*tiles, resized(image, square, rules)], (rows, columns))


def _best_grid(image: Image, rules: ImageRules) -> tuple[int, int]:
    """Returns the rows and columns whose ratio is nearest to the image's; of several, the last one
    that is not much larger than the image.
    """
    assert rules.side is not None, "tiles have a side"
    fewest, most = rules.num_tiles
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= fewest
    ]
    ratio = image.width / image.height
    best, least = (1, 1), math.inf
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(ratio - columns / rows)
        is_large = image.width * image.height > 0.5 * rules.side**2 * rows * columns
        if difference < least or (difference == least and is_large):
            best, least = (rows, columns), difference
    return best


def _to_padded_tiles(image: Image, rules: ImageRules) -> Views:
    """Scales within the best resolution, pads and cuts tiles, after a view of the entire image, as
    LLaVA-NeXT.
    """
    import PIL.Image

    assert rules.side is not None, "tiles have a side"
    _check_ratio(image)
    height, width = _best_resolution(image, rules.resolutions)
    by_width, by_height = width / image.width, height / image.height
    if by_width < by_height:
        size = PixelSize(min(math.ceil(image.height * by_width), height), width)
    else:
        size = PixelSize(height, min(math.ceil(image.width * by_height), width))
    canvas = PIL.Image.new("RGB", (width, height))
    corner = ((width - size.width) // 2, (height - size.height) // 2)
    canvas.paste(resized(image, size, rules), corner)
    tiles = (height // rules.side, width // rules.side)
    entire = resized(image, PixelSize(rules.side, rules.side), rules)
    return Views([entire, *_cut(canvas, *tiles, rules.side)], tiles)


def pad_to_square(image: Image, rules: ImageRules) -> Views:
    """Pads an image with the mean color to a square and scales it, as LLaVA-OneVision does with
    each of several images.
    """
    import PIL.Image

    assert rules.side is not None, "tiles have a side"
    _check_ratio(image)
    long = max(image.size)
    red, green, blue = (int(mean * 255) for mean in rules.mean)
    canvas = PIL.Image.new("RGB", (long, long), (red, green, blue))
    canvas.paste(image, ((long - image.width) // 2, (long - image.height) // 2))
    return Views([resized(canvas, PixelSize(rules.side, rules.side), rules)])


def _best_resolution(image: Image, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the resolution that keeps the most pixels, of several the one with least padding."""

    def rate(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / image.width, size[0] / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        return kept, kept - size[0] * size[1]

    return max(resolutions, key=rate)


def _cut(image: Image, rows: int, columns: int, side: int) -> list[Image]:
    return [
        image.crop((left, top, left + side, top + side))
        for top in range(0, rows * side, side)
        for left in range(0, columns * side, side)
    ]


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
    "crop": _to_square,
    "tiles": _to_tiles,
    "best_tiles": _to_best_tiles,
    "padded_tiles": _to_padded_tiles,
    "budget": _by_budget,
}
