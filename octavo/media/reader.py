"""Reads the images of a prompt: fetches bytes, decodes, resizes."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.engine.protocol.step import MediaContent
from octavo.media.image_tokens import ImageTokens
from octavo.media.limits import ImageLimits, check_count, check_size, image_error
from octavo.media.rules import ImageRules
from octavo.media.sources import read_own_file, read_source
from octavo.media.video import VideoReader, group_frames, video_error
from octavo.media.views import cut_views, pad_to_square
from octavo.text.ports import DecodedMedia, MediaKind, PrefixPrompt, VideoSource

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Supported formats; only the first frame of an animation is read."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PillowReader:
    """Reads images and videos with Pillow."""

    rules: ImageRules
    limits: ImageLimits
    tokens: ImageTokens
    replacements: Mapping[str, str] = field(default_factory=dict)
    """Placeholder texts in a prompt and their replacements, each of which contains the token once.
    """
    videos: VideoReader | None = None
    """Reads videos; None if the model reads none."""
    prefix: PrefixPrompt | None = None

    @property
    def token_ids(self) -> Mapping[MediaKind, int]:
        """Placeholder tokens of images, and of videos if the model reads them."""
        token_ids: dict[MediaKind, int] = {"image": self.tokens.token_id}
        if self.videos is not None:
            token_ids["video"] = self.videos.tokens.token_id
        return token_ids

    def read(self, sources: Sequence[Any]) -> list[DecodedMedia]:
        """Reads images from URLs, paths, bytes, Pillow images or arrays, and videos."""
        num_videos = sum(map(is_video, sources))
        check_count(len(sources) - num_videos, self.limits)
        if self.videos is not None:
            check_count(num_videos, self.videos.limits)
        need_pillow()
        is_alone = len(sources) == 1
        return [self._read(source, is_alone=is_alone) for source in sources]

    def _read(self, source: object, *, is_alone: bool) -> DecodedMedia:
        if isinstance(source, DecodedMedia):
            return source
        if not isinstance(source, VideoSource):
            return self._cut_and_resize(self._image(source), is_alone=is_alone)
        if self.videos is None:
            raise video_error(
                "got a video, but the model reads images only",
                "use a model that reads videos, such as Qwen3-VL, or send frames as images",
            )
        frames = self.videos.read(source, self._image)
        groups = group_frames(frames, self.videos.rules)
        pixels = [self._pixels(group.images, num_frames=len(group.images)) for group in groups]
        seconds = [group.second for group in groups]
        group_seconds = self.videos.rules.group / frames.sampled_fps
        return self.tokens.decode_video(self.videos.tokens, pixels, seconds, group_seconds)

    def _image(self, source: object) -> Image:
        if isinstance(source, str):
            return decoded(read_source(source, self.limits), self.limits)
        if isinstance(source, Path):  # a server's clients cannot send these
            return decoded(read_own_file(source, self.limits), self.limits)
        if isinstance(source, bytes):
            return decoded(source, self.limits)
        return as_image(source, self.limits)

    def _cut_and_resize(self, image: Image, *, is_alone: bool) -> DecodedMedia:
        if self.tokens.tiles_alone and not is_alone:
            views = pad_to_square(image, self.rules)
        else:
            views = cut_views(image, self.rules)
        if not self.tokens.has_newline:
            return self.tokens.decode([self._pixels([view]) for view in views.images], views.tiles)
        pixels = self._pixels(views.images, views.tiles, (image.height, image.width))
        return self.tokens.decode([pixels], views.tiles)

    def _pixels(
        self,
        views: Sequence[Image],
        tiles: tuple[int, int] = (0, 0),
        source: tuple[int, int] = (0, 0),
        *,
        num_frames: int = 1,
    ) -> MediaContent:
        """Returns views of one size below each other, or the frames of a video."""
        data = b"".join(view.tobytes() for view in views)
        height, width = len(views) // num_frames * views[0].height, views[0].width
        digest = self._digest((height, width, *tiles, *source), data)
        return MediaContent(
            digest=digest,
            height=height,
            width=width,
            data=data,
            num_frames=num_frames,
            tiles=tiles,
            source=source,
        )

    def _digest(self, sizes: tuple[int, ...], data: bytes) -> bytes:
        """Returns a digest of everything that determines the vision tower's output, except its
        weights.
        """
        scale = (self.rules.factor, *self.rules.mean, *self.rules.std)
        digest = blake2b(digest_size=DIGEST_BYTES, person=b"octavo image")
        digest.update(struct.pack("<6Q7d", *sizes, *scale))
        digest.update(data)
        return digest.digest()


def is_video(source: object) -> bool:
    if isinstance(source, DecodedMedia):
        return source.kind == "video"
    return isinstance(source, VideoSource)


def need_pillow() -> None:
    """Raises InvalidRequest if Pillow is not installed.

    A bad file raises InvalidRequest with a hint.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise image_error(
            "decoding images requires Pillow, which is not installed",
            "install it on the engine's machine: pip install 'octavo[media]'",
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
            "the bytes are not a supported image", f"send one of {', '.join(FORMATS)}"
        ) from None
    except PIL.Image.DecompressionBombError as error:
        raise image_error(f"it has too many pixels: {error}", "resize the image") from None
    except MemoryError:
        raise image_error("it does not fit in memory", "resize the image") from None
    except (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, TypeError,
            ArithmeticError, AttributeError, RuntimeError) as error:  # fmt: skip
        raise image_error(
            f"the file is damaged or ends too early: {error}", "upload the complete file again"
        ) from None


def as_image(image: object, limits: ImageLimits) -> Image:
    """Converts a Python image: a Pillow image or an array `[rows, columns, 3] u8`."""
    import PIL.Image

    if isinstance(image, PIL.Image.Image):
        check_size(*image.size, limits)
        return image.convert("RGB")
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise image_error(
                f"got an array {image.shape} of {image.dtype}, expected [rows, columns, 3] of"
                " uint8",
                "pass RGB bytes",
            )
        check_size(image.shape[1], image.shape[0], limits)
        return PIL.Image.fromarray(image)
    raise image_error(
        f"got {type(image).__name__}, expected an image of Pillow, bytes of a file, an array, a"
        " path, or a string with a data URL",
        "open the file with PIL.Image.open",
    )
