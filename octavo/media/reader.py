"""Reads the images of a prompt: fetches bytes, decodes, resizes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.api.errors import InvalidRequest
from octavo.engine.protocol.step import MediaPixels
from octavo.media.decode import as_image, decoded, need_pillow
from octavo.media.limits import ImageLimits
from octavo.media.rules import ImageRules
from octavo.media.sources import read_file, read_source
from octavo.text.ports import ReadImage

if TYPE_CHECKING:
    from PIL.Image import Image

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PillowReader:
    """Implements `ImageReader` with Pillow."""

    rules: ImageRules
    limits: ImageLimits
    token_id: int
    """Placeholder token of each image row."""
    is_whole: bool
    """Whether an image's rows attend to one another."""
    replacements: Mapping[str, str] = field(default_factory=dict)
    """Placeholder texts in a prompt and their replacements, each of which contains the token once.
    """

    def read(self, sources: Sequence[Any]) -> list[ReadImage]:
        """Reads images from URLs, paths, bytes, Pillow images or arrays."""
        if len(sources) > self.limits.max_images:
            raise InvalidRequest(
                f"image: got {len(sources)} images, allowed are {self.limits.max_images} a prompt",
                hint="send fewer, or start the engine with a larger --max-images",
                param="image",
            )
        need_pillow()
        return [
            source if isinstance(source, ReadImage) else self._scaled(self._image(source))
            for source in sources
        ]

    def _image(self, source: object) -> Image:
        if isinstance(source, str):
            return decoded(read_source(source, self.limits), self.limits)
        if isinstance(source, Path):  # which no client of a server can send
            return decoded(_own_file(source, self.limits), self.limits)
        if isinstance(source, bytes):
            return decoded(source, self.limits)
        return as_image(source, self.limits)

    def _scaled(self, image: Image) -> ReadImage:
        height, width = self.rules.get_size(image.height, image.width)
        data = image.resize((width, height), self.rules.resample).tobytes()  # type: ignore[arg-type]
        rows, columns = height // self.rules.multiple, width // self.rules.multiple
        pixels = MediaPixels(self._digest(height, width, data), height, width, data)
        return ReadImage(pixels, rows * columns, (rows, columns), self.is_whole)

    def _digest(self, height: int, width: int, data: bytes) -> bytes:
        """Returns a digest of all inputs of the vision tower except its weights."""
        scale = (self.rules.factor, *self.rules.mean, *self.rules.std)
        digest = blake2b(digest_size=DIGEST_BYTES, person=b"octavo image")
        digest.update(struct.pack("<QQ7d", height, width, *scale))
        digest.update(data)
        return digest.digest()


def _own_file(path: Path, limits: ImageLimits) -> bytes:
    """Reads a file that the embedding program names."""
    own = ImageLimits(limits.max_images, limits.max_bytes, limits.max_pixels, folder=path.parent)
    return read_file(path.name, own)
