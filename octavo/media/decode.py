"""Decodes images with Pillow, within limits that are checked before pixels are decoded.

A bad file raises InvalidRequest with a hint.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.media.limits import ImageLimits, check_size, image_error

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Supported formats; only the first frame of an animation is read."""


def need_pillow() -> None:
    """Raises InvalidRequest if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise image_error(
            "got an image, and Pillow, which decodes images, is not installed here",
            "install it where the engine runs: pip install 'octavo[media]'",
        ) from error


def decoded(data: bytes, limits: ImageLimits) -> Image:
    """Decodes an image file to RGB and applies its EXIF orientation."""
    import PIL.Image
    import PIL.ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes are checked here, before pixels are decoded
            image: Any = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(image.width, image.height, limits)
            image.load()
            return PIL.ImageOps.exif_transpose(image).convert("RGB")
    except PIL.UnidentifiedImageError:
        raise image_error(
            "the bytes are no image that can be read", f"send one of {', '.join(FORMATS)}"
        ) from None
    except PIL.Image.DecompressionBombError as error:
        raise image_error(f"it has too many pixels: {error}", "scale the image down") from None
    except MemoryError:
        raise image_error("it does not fit into memory", "scale the image down") from None
    except (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, TypeError,
            ArithmeticError, AttributeError, RuntimeError) as error:  # fmt: skip
        raise image_error(
            f"the file is damaged or ends too early: {error}", "send the whole file again"
        ) from None


def as_image(given: object, limits: ImageLimits) -> Image:
    """Converts a Python image: a Pillow image or an array `[rows, columns, 3] u8`."""
    import PIL.Image

    if isinstance(given, PIL.Image.Image):
        check_size(*given.size, limits)
        return given.convert("RGB")
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
            raise image_error(
                f"got an array {given.shape} of {given.dtype}, allowed are [rows, columns, 3] of"
                " uint8",
                "give red, green and blue as bytes, pixel by pixel",
            )
        check_size(given.shape[1], given.shape[0], limits)
        return PIL.Image.fromarray(given)
    raise image_error(
        f"got {type(given).__name__}, allowed are an image of Pillow, bytes of a file, an array, a"
        " path, or a text with a data URL",
        "open the file with PIL.Image.open",
    )
