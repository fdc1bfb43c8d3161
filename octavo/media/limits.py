"""Limits on images, and the errors that report them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.api.errors import InvalidRequest
from octavo.text.ports import MEDIA_PLURALS

MAX_SIDE = 1 << 16
"""Longest side in pixels; no supported format has more."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on images, checked before decoding."""

    max_images: int
    """Images per prompt."""
    max_bytes: int
    """Bytes per image file."""
    max_pixels: int
    """Pixels per image, before resizing."""
    folder: Path | None = None
    """Folder from which files may be read; None: no files."""
    fetches_urls: bool = False
    """Whether http and https URLs are fetched."""
    noun: str = "image"
    """What is limited, as errors and options call it."""

    def error(self, what: str, hint: str) -> InvalidRequest:
        return InvalidRequest(f"{self.noun}: {what}", hint=hint, param=self.noun)


def image_error(what: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"image: {what}", hint=hint, param="image")


def check_count(count: int, limits: ImageLimits) -> None:
    if count > limits.max_images:
        nouns = MEDIA_PLURALS[limits.noun]
        raise limits.error(
            f"got {count} {nouns}, expected at most {limits.max_images} per prompt",
            f"send fewer {nouns}, or start the engine with a larger --max-{limits.noun}s",
        )


def check_bytes(num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes == 0:
        raise limits.error("got no bytes", "upload the complete file")
    if num_bytes > limits.max_bytes:
        raise limits.error(
            f"got a file of {num_bytes:,} bytes or more, expected at most {limits.max_bytes:,}",
            f"send a smaller {limits.noun}, or start the engine with a larger"
            f" --max-{limits.noun}-bytes",
        )


def check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width < 1 or height < 1 or max(width, height) > MAX_SIDE:
        raise limits.error(
            f"got {width:,} x {height:,} pixels, expected 1 to {MAX_SIDE:,} a side",
            "send an image of a supported size",
        )
    if width * height > limits.max_pixels:
        raise limits.error(
            f"got {width:,} x {height:,} pixels, expected at most {limits.max_pixels:,} in all",
            "resize the image, or start the engine with a larger --max-image-pixels",
        )
