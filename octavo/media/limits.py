"""The limits of what an image may be, and the errors that name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.api.errors import InvalidRequest

MAX_SIDE = 1 << 16
"""Most pixels of an image's side, whatever its area: no format that is read has more."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on images, which every one is held to before it is decoded."""

    max_images: int
    """Most images of one prompt."""
    max_bytes: int
    """Most bytes of a file with an image."""
    max_pixels: int
    """Most pixels of an image as it is sent."""
    folder: Path | None = None
    """Folder whose files may be named; None: no file may."""
    fetches_urls: bool = False
    """Whether images are fetched from http and https addresses."""


def refused(what: str, hint: str) -> InvalidRequest:
    """Returns the refusal of one image."""
    return InvalidRequest(f"image: {what}", hint=hint, param="image")


def check_bytes(num_bytes: int, limits: ImageLimits) -> None:
    """Refuses a file that is empty or too large."""
    if num_bytes == 0:
        raise refused("got no bytes", "send the whole file")
    if num_bytes > limits.max_bytes:
        raise refused(
            f"got a file of {num_bytes:,} bytes or more, allowed are {limits.max_bytes:,}",
            "send a smaller image, or start the engine with a larger --max-image-bytes",
        )


def check_size(width: int, height: int, limits: ImageLimits) -> None:
    """Refuses an image without pixels, or with too many."""
    if width < 1 or height < 1 or max(width, height) > MAX_SIDE:
        raise refused(
            f"got {width:,} x {height:,} pixels, allowed are 1 to {MAX_SIDE:,} a side",
            "send an image of an ordinary size",
        )
    if width * height > limits.max_pixels:
        raise refused(
            f"got {width:,} x {height:,} pixels, allowed are {limits.max_pixels:,} in all",
            "scale the image down, or start the engine with a larger --max-image-pixels",
        )
