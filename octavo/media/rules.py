"""Image size and normalization of a model, from its preprocessor_config.json.

Source of names, defaults and formulas: the Pillow-based image processors of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from octavo.api.errors import UnsupportedModel
from octavo.media.limits import image_error

MAX_RATIO = 200
"""Largest aspect ratio of an image that keeps its shape."""

FILES = ("preprocessor_config.json", "processor_config.json")

STANDARD = ((0.5,) * 3, (0.5,) * 3)
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Means and standard deviations of colors for SigLIP and for CLIP."""

BILINEAR, BICUBIC = 2, 3


class PixelSize(NamedTuple):
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Resizing and normalization before the vision tower."""

    side: int | None
    """Fixed side in pixels; None: images keep their aspect ratio."""
    multiple: int
    """Heights and widths are multiples of this many pixels."""
    min_pixels: int
    max_pixels: int
    """Area limits of an image that keeps its aspect ratio."""
    resample: int
    """Resampling filter, by Pillow's number."""
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Normalization: (pixel * factor - mean) / std."""

    def get_size(self, height: int, width: int) -> PixelSize:
        if self.side is not None:
            return PixelSize(self.side, self.side)
        if max(height, width) > MAX_RATIO * min(height, width):
            raise image_error(
                f"got {width:,} x {height:,} pixels, expected a side at most {MAX_RATIO} times"
                " the other",
                "split the image",
            )
        return scaled_size(height, width, self)


def scaled_size(height: int, width: int, rules: ImageRules) -> PixelSize:
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


def image_rules(
    config: Mapping[str, Any], *, side: int | None, multiple: int, max_tokens: int
) -> ImageRules:
    """Reads the rules from the contents of preprocessor_config.json; {} for a model without this
    file.

    `side` and `multiple` are the tower's; an image has at most `max_tokens` tokens.
    """
    config = config.get("image_processor", config)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(name) is False:
            raise _wrong(name, False, "true")
    if config.get("do_pan_and_scan"):
        raise _wrong("do_pan_and_scan", True, "false")
    size = config.get("size") or {}
    mean, std = STANDARD if side is not None else CLIP
    if side is not None and size and {size.get("height"), size.get("width")} != {side}:
        raise _wrong("size", size, f"the {side} pixels of the tower's images")
    low = config.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    high = config.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return ImageRules(
        side=side,
        multiple=multiple,
        min_pixels=_number("min_pixels", low),
        max_pixels=min(_number("max_pixels", high), max_tokens * multiple**2),
        resample=config.get("resample", BICUBIC if side is None else BILINEAR),
        factor=float(config.get("rescale_factor", 1 / 255)),
        mean=_colours("image_mean", config.get("image_mean") or mean),
        std=_colours("image_std", config.get("image_std") or std),
    )


def rules_file(path: Path) -> Path | None:
    """Returns the preprocessor config file in a checkpoint folder; None if there is none."""
    return next((path / name for name in FILES if (path / name).is_file()), None)


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "an integer above 0")
    return value


def _colours(name: str, value: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise _wrong(name, value, "three numbers")
    return tuple(map(float, value))


def _wrong(name: str, value: object, allowed: str) -> UnsupportedModel:
    return UnsupportedModel(f"preprocessor_config.json: {name} is {value!r}, expected {allowed}")
