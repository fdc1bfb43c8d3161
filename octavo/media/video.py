"""Reads the videos of a prompt: decodes frames, samples and resizes them, and groups them for the
vision tower.

Files are decoded by PyAV, which is imported when the first one arrives. Source of the formulas: the
video processors of transformers 5.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.api.errors import InvalidRequest
from octavo.media.image_tokens import VideoTokens
from octavo.media.limits import ImageLimits, check_size
from octavo.media.rules import ImageRules, PixelSize
from octavo.media.sources import read_base64, read_source
from octavo.media.views import area_size, budget_size, resized
from octavo.text.ports import VideoSource

if TYPE_CHECKING:
    from PIL.Image import Image

FRAME_RATE = 2.0
"""Frames per second of a list of frames without a rate."""
JPEG_FRAMES = "data:video/jpeg;base64,"
"""Begin of a URL with one base64 JPEG per frame, separated by commas (vLLM)."""
BUDGET_FRAMES, BUDGET_TOKENS = 32, 70
"""Defaults of Gemma 4: frames of a video, and most tokens of a frame."""
MAX_DECODED_FRAMES = 100_000
"""Longest video file that is decoded, in frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """Sampling and resizing of frames before the vision tower."""

    image: ImageRules
    fps: float
    """Sampled frames per second."""
    min_frames: int
    max_frames: int
    group: int
    """Frames that the tower computes together."""
    min_pixels: int
    max_pixels: int
    is_total: bool
    """Whether the area limits apply to all frames of a video together, instead of to each."""
    num_frames: int | None = None
    """Number of frames that are sampled of a longer video, evenly; None: `fps`."""


class Frames(NamedTuple):
    """Frames of a video, in order."""

    images: list[Image]
    indices: Sequence[int]
    """Index of each frame in the source."""
    fps: float
    """Frames per second of the source."""
    total: int
    """Number of frames of the source."""

    @property
    def sampled_fps(self) -> float:
        return len(self.images) / self.total * self.fps


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Reads the frames of videos."""

    rules: VideoRules
    limits: ImageLimits
    tokens: VideoTokens

    def read(self, source: VideoSource, read_image: Callable[[Any], Image]) -> Frames:
        """Reads a video's frames, sampled unless they are given one by one; `read_image` reads a
        frame.
        """
        video = source.video
        if isinstance(video, str) and video[:48].lower().startswith(JPEG_FRAMES):
            texts = video.partition(",")[2].split(",")
            _check_count(len(texts), self.rules)
            video = [read_base64(text, self.limits) for text in texts]
        if isinstance(video, list | tuple):
            _check_count(len(video), self.rules)
            images = [read_image(frame) for frame in video]
            check_sizes(images)
            fps = self.rules.fps if source.fps is None else source.fps
            return Frames(images, range(len(images)), fps, len(images))
        data = read_source(video, self.limits) if isinstance(video, str) else video
        if not isinstance(data, bytes):
            raise video_error(
                f"got {type(video).__name__}, expected a list of frames, bytes of a file, or a"
                " string with a data URL",
                "pass a list of images",
            )
        return decode_video(data, self.rules, self.limits)


class FrameGroup(NamedTuple):
    """Frames that the tower computes together, resized."""

    images: list[Image]
    second: float
    """Mean time of the first and last frame."""


def video_error(what: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"video: {what}", hint=hint, param="video")


def video_rules(
    config: Mapping[str, Any], image: ImageRules, *, group: int, is_total: bool, max_frames: int
) -> VideoRules:
    """Reads the rules from the contents of video_preprocessor_config.json; {} for a model without
    this file, whose frames are resized like images.
    """
    size = config.get("size") or {}
    low = config.get("min_pixels") or size.get("shortest_edge")
    high = config.get("max_pixels") or size.get("longest_edge")
    unit = image.multiple**2
    num_frames = None
    if image.resize == "budget":
        num_frames = min(int(config.get("num_frames") or BUDGET_FRAMES), max_frames)
        high = int(config.get("max_soft_tokens") or BUDGET_TOKENS) * unit
        high = min(high, image.max_pixels)  # the tower is sized for the largest image
    return VideoRules(
        image=image,
        fps=float(config.get("fps") or FRAME_RATE),
        min_frames=int(config.get("min_frames") or 4),
        max_frames=min(int(config.get("max_frames") or 768), max_frames),
        group=group,
        min_pixels=int(low or (128 * unit if is_total else image.min_pixels)),
        max_pixels=int(high or (768 * unit if is_total else image.max_pixels)),
        is_total=is_total,
        num_frames=num_frames,
    )


def sample_frames(total: int, fps: float, rules: VideoRules) -> list[int]:
    """Returns the indices of the frames that are read of a video of `total` frames."""
    if rules.num_frames is not None:
        step = total / min(rules.num_frames, total)
        return [int(index * step) for index in range(min(rules.num_frames, total))]
    count = total / fps * rules.fps
    if rules.is_total:
        num = min(max(int(count), rules.min_frames), rules.max_frames, total)
        indices: list[int] = np.linspace(0, total - 1, num).round().astype(int).tolist()
        return indices
    most = min(rules.max_frames, total) // rules.group * rules.group
    num = math.floor(min(max(count, rules.min_frames), most) / rules.group) * rules.group
    return [int(index * total / num) for index in range(num)] if num else list(range(total))


def group_frames(frames: Frames, rules: VideoRules) -> list[FrameGroup]:
    """Resizes the frames and groups them; the last frame is repeated to fill its group."""
    first = frames.images[0]
    size = frame_size(len(frames.images), first.height, first.width, rules)
    missing = -len(frames.images) % rules.group
    images = [resized(image, size, rules.image) for image in frames.images]
    images += images[-1:] * missing
    seconds = [index / frames.fps for index in frames.indices]
    seconds += seconds[-1:] * missing
    return [
        FrameGroup(
            images[start : start + rules.group],
            (seconds[start] + seconds[start + rules.group - 1]) / 2,
        )
        for start in range(0, len(images), rules.group)
    ]


def frame_size(num_frames: int, height: int, width: int, rules: VideoRules) -> PixelSize:
    """Returns the size to which the frames of a video are resized."""
    unit = rules.image.multiple
    if not rules.is_total:
        limits = replace(rules.image, min_pixels=rules.min_pixels, max_pixels=rules.max_pixels)
        find_size = budget_size if rules.image.resize == "budget" else area_size
        return find_size(height, width, limits)
    if min(height, width) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    high, wide = (round(side / unit) * unit for side in (height, width))
    pixels = round(num_frames / rules.group) * rules.group * high * wide
    if pixels > rules.max_pixels:
        shrink = math.sqrt(num_frames * height * width / rules.max_pixels)
        high, wide = (
            max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)
        )
    elif pixels < rules.min_pixels:
        grow = math.sqrt(rules.min_pixels / (num_frames * height * width))
        high, wide = (math.ceil(side * grow / unit) * unit for side in (height, width))
    if high * wide > rules.image.max_pixels:  # the tower is sized for the largest image
        return area_size(high, wide, rules.image)
    return PixelSize(high, wide)


def _check_count(count: int, rules: VideoRules) -> None:
    if not 1 <= count <= rules.max_frames:
        raise video_error(
            f"got {count:,} frames, expected 1 to {rules.max_frames:,}",
            "sample fewer frames, or start the engine with a larger --max-video-frames",
        )


def check_sizes(images: Sequence[Image]) -> None:
    """Raises InvalidRequest for frames of different sizes."""
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        shown = " and ".join(f"{width} x {height}" for width, height in sorted(sizes)[:2])
        raise video_error(f"got frames of {shown} pixels, expected one size", "resize the frames")


def decode_video(data: bytes, rules: VideoRules, limits: ImageLimits) -> Frames:
    """Decodes the sampled frames of a video file."""
    try:
        import av
    except ImportError as error:
        raise video_error(
            "decoding videos requires PyAV, which is not installed",
            "install it on the engine's machine: pip install 'octavo[video]'; or send frames as"
            " data:video/jpeg;base64,FRAME,FRAME,...",
        ) from error
    try:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.video[0]
            check_size(stream.width, stream.height, limits)
            fps = float(stream.average_rate or 24)
            total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        if not 1 <= total <= MAX_DECODED_FRAMES:
            raise video_error(
                f"got a video of {total:,} frames, expected 1 to {MAX_DECODED_FRAMES:,}",
                "cut the video",
            )
        wanted = sample_frames(total, fps, rules)
        found: dict[int, Image] = {}
        with av.open(io.BytesIO(data), "r") as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in wanted:
                    image: Image = frame.to_image()  # type: ignore[no-untyped-call]
                    found[index] = image.convert("RGB")
                if index >= wanted[-1]:
                    break
    except (av.FFmpegError, IndexError, ValueError, MemoryError) as error:
        raise video_error(
            f"the file is damaged or not a supported video: {error}", "upload the complete file"
        ) from None
    kept = [index for index in wanted if index in found]
    if not kept:
        raise video_error("the file contains no frame", "upload the complete file")
    return Frames([found[index] for index in kept], kept, fps, total)
