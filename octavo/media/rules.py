"""Image size and normalization of a model, from its preprocessor_config.json.

Source of names, defaults and formulas: the Pillow-based image processors of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from octavo.api.errors import UnsupportedModel

Colors = tuple[tuple[float, ...], tuple[float, ...]]
"""Means and standard deviations."""

FILES = ("preprocessor_config.json", "processor_config.json")

STANDARD: Colors = ((0.5,) * 3, (0.5,) * 3)
CLIP: Colors = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Means and standard deviations of colors for SigLIP and for CLIP."""

MAX_TOKENS = 2048
"""Most tokens of an image of a model without a longest edge."""

MAX_TILES = 1024
"""Upper bound of the tiles of an image."""

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3


class PixelSize(NamedTuple):
    height: int
    width: int


Resize = Literal[
    "area", "longest_edge", "square", "crop", "tiles", "best_tiles", "padded_tiles", "budget"
]
"""How an image is resized; `views.py` has a function for each."""

DEFAULTS: dict[Resize, tuple[Colors, int]] = {
    "area": (CLIP, BICUBIC),
    "longest_edge": (CLIP, BICUBIC),
    "square": (STANDARD, BILINEAR),
    "crop": (CLIP, BICUBIC),
    "tiles": (STANDARD, LANCZOS),
    "best_tiles": (CLIP, BICUBIC),
    "padded_tiles": (CLIP, BICUBIC),
    "budget": (STANDARD, BICUBIC),
}
"""Means and standard deviations, and resampling filter, that the files may omit."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Resizing and normalization before the vision tower."""

    resize: Resize
    side: int | None
    """Fixed side in pixels; None: images keep their aspect ratio."""
    multiple: int
    """Heights and widths are multiples of this many pixels."""
    min_pixels: int
    max_pixels: int
    """Area limits of an image that keeps its aspect ratio."""
    edge: int
    """Longest edge in pixels; or the shortest one of a square that is cropped; 0: not cropped."""
    num_tiles: tuple[int, int]
    """Fewest and most tiles that an image is divided into; (1, 1): it is not divided."""
    resolutions: tuple[tuple[int, int], ...]
    """Heights and widths that an image may be padded to before it is divided."""
    resample: int
    """Resampling filter, by Pillow's number."""
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Normalization: (pixel * factor - mean) / std."""


def image_rules(
    config: Mapping[str, Any],
    *,
    side: int | None,
    multiple: int,
    max_tokens: int | None = None,
    resize: Resize | None = None,
    resolutions: tuple[tuple[int, int], ...] = (),
    default_tokens: int | None = None,
) -> ImageRules:
    """Reads the rules from the contents of preprocessor_config.json; {} for a model without this
    file.

    `side` and `multiple` are the tower's; an image that keeps its aspect ratio has at most
    `max_tokens` tokens (None: as many as a square of the longest edge, or `MAX_TOKENS`). Without
    `resize`, images are scaled to `side`, or within an area. `default_tokens`: most tokens of an
    image that is scaled to a budget, if the file does not say.
    """
    config = config.get("image_processor", config)
    if resize == "budget":
        budget = _number("max_soft_tokens", config.get("max_soft_tokens") or default_tokens)
        max_tokens = min(budget, max_tokens or budget)
        config = {name: config[name] for name in ("resample",) if name in config}
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(name) is False:
            raise _wrong(name, False, "true")
    if config.get("do_pan_and_scan"):
        raise _wrong("do_pan_and_scan", True, "false")
    resize = resize or ("area" if side is None else "square")
    size = config.get("size") or {}
    if isinstance(size, int):
        size = {"shortest_edge": size}
    (mean, std), resample = DEFAULTS[resize]
    edge = EDGES[resize](config, size, side)
    if max_tokens is None:
        max_tokens = (-(-edge // multiple)) ** 2 if resize == "longest_edge" else MAX_TOKENS
    low = config.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    high = config.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    if resize != "area":
        low, high = 1, max_tokens * multiple**2
    return ImageRules(
        resize=resize,
        side=side,
        multiple=multiple,
        min_pixels=_number("min_pixels", low),
        max_pixels=min(_number("max_pixels", high), max_tokens * multiple**2),
        edge=edge,
        num_tiles=_num_tiles(config, resize),
        resolutions=resolutions,
        resample=config.get("resample", resample),
        factor=float(config.get("rescale_factor", 1 / 255)),
        mean=_colours("image_mean", config.get("image_mean") or mean),
        std=_colours("image_std", config.get("image_std") or std),
    )


def _no_edge(config: Mapping[str, Any], size: Mapping[str, Any], side: int | None) -> int:
    return 0


def _longest_edge(config: Mapping[str, Any], size: Mapping[str, Any], side: int | None) -> int:
    sides = {size.get("height"), size.get("width")}
    edge = size.get("longest_edge") or (sides.pop() if len(sides) == 1 else None) or 1024
    return _number("size", edge)


def _cropped_edge(config: Mapping[str, Any], size: Mapping[str, Any], side: int | None) -> int:
    """Returns the shortest edge before cropping; 0 if the image is scaled to the square."""
    if config.get("do_pad"):
        raise _wrong("do_pad", True, "false")
    edge, crop = size.get("shortest_edge"), config.get("crop_size") or {}
    if edge is None:
        if size and {size.get("height"), size.get("width")} != {side}:
            raise _wrong("size", size, f"the {side} pixels of the tower's images")
        return 0
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    if config.get("do_center_crop") is False or {crop.get("height"), crop.get("width")} != {side}:
        raise _wrong("crop_size", crop, f"the {side} pixels of the tower's images")
    return _number("size", edge)


def _edge_of_tiles(config: Mapping[str, Any], size: Mapping[str, Any], side: int | None) -> int:
    """Returns the longest edge before an image is divided into tiles."""
    given = (config.get("max_image_size") or {}).get("longest_edge", side)
    if given != side:
        raise _wrong("max_image_size", given, f"the {side} pixels of the tower's images")
    return _number("size", size.get("longest_edge") or 4 * (side or 1))


def _num_tiles(config: Mapping[str, Any], resize: Resize) -> tuple[int, int]:
    if resize == "tiles":
        return (1, 1) if config.get("do_image_splitting") is False else (1, MAX_TILES)
    if resize != "best_tiles" or config.get("crop_to_patches") is False:
        return (1, 1)
    fewest = _number("min_patches", config.get("min_patches", 1))
    most = _number("max_patches", config.get("max_patches", 12))
    if not fewest <= most <= MAX_TILES:
        raise _wrong("max_patches", most, f"an integer from {fewest} to {MAX_TILES}")
    return (fewest, most)


EDGES: dict[Resize, Callable[[Mapping[str, Any], Mapping[str, Any], int | None], int]] = {
    "area": _no_edge,
    "longest_edge": _longest_edge,
    "square": _cropped_edge,
    "crop": _cropped_edge,
    "tiles": _edge_of_tiles,
    "best_tiles": _cropped_edge,
    "padded_tiles": _no_edge,
    "budget": _no_edge,
}
"""Functions that read `ImageRules.edge`."""


def rules_file(path: Path) -> Path | None:
    """Returns the preprocessor config file in a checkpoint folder; None if there is none."""
    return next((path / name for name in FILES if (path / name).is_file()), None)


def video_rules_file(path: Path) -> Path | None:
    """Returns the preprocessor config file of videos; None if there is none."""
    file = path / "video_preprocessor_config.json"
    return file if file.is_file() else None


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
