"""Videos: frames are sampled and resized as transformers does, and models that read them give its
logits.
"""

from __future__ import annotations

import io
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.video_utils import default_sample_indices_fn

from octavo.api.errors import InvalidRequest
from octavo.frontend.media import PromptWithMedia
from octavo.media.limits import ImageLimits
from octavo.media.rules import image_rules
from octavo.media.video import VideoRules, decode_video, frame_size, sample_frames
from octavo.text.ports import VideoSource
from tests.models.test_images import IMAGE_ID, TOLERANCE, SeeingRunner, oracle, runner
from tests.support.tiny_images import COLOURS, QWEN, picture, processor_of
from tests.support.tiny_models import double_precision

processing = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
VIDEO_ID = 303
PATCH, CELL, GROUP = 4, 2, 2
WIDTH, HEIGHT, FRAMES, FPS = 24, 16, 3, 1.0
"""Frames of a size that is not changed; the last group is filled with its frame."""


def frames() -> list[Any]:
    return [picture(10 + index, WIDTH, HEIGHT) for index in range(FRAMES)]


def placed_video(run: SeeingRunner) -> PromptWithMedia:
    assert run.tokenizer is not None
    text = "See <|vision_start|><|image_pad|><|vision_end|> and"
    text += " <|vision_start|><|video_pad|><|vision_end|> What happens in it?"
    ids = run.tokenizer.encode(run.images.replaced(text), allow_special_text=True)
    return run.images.placed(ids, [picture(0), VideoSource(frames(), FPS)])


def video_pixels() -> torch.Tensor:
    """Returns the patches of the frames as transformers' video processors order them."""
    made = np.stack([np.asarray(frame, np.float32) for frame in [*frames(), frames()[-1]]]) / 255
    made = (made - np.float32(COLOURS["image_mean"])) / np.float32(COLOURS["image_std"])
    cells = made.transpose(0, 3, 1, 2).reshape(
        (-1, GROUP, 3, HEIGHT // PATCH // CELL, CELL, PATCH, WIDTH // PATCH // CELL, CELL, PATCH)
    )
    patches = cells.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return torch.tensor(patches.reshape(-1, 3 * GROUP * PATCH**2))


def expected(family: str, placed: PromptWithMedia) -> NDArray[np.float64]:
    made = processor_of(family)(images=[picture(0)], return_tensors="pt")
    ids = torch.tensor([placed.token_ids])
    grid = torch.tensor([[2, HEIGHT // PATCH, WIDTH // PATCH]])
    kinds = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
    inputs: dict[str, Any] = {
        "pixel_values": made["pixel_values"].double(),
        "image_grid_thw": made["image_grid_thw"],
        "pixel_values_videos": video_pixels().double(),
        "video_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([GROUP / FPS])
    with double_precision():
        logits = oracle(family)(input_ids=ids, use_cache=False, **inputs).logits
    found: NDArray[np.float64] = logits[0].numpy()
    return found


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("family", [name for name in QWEN if not name.endswith("moe")])
def test_logits_of_a_video_equal_transformers(family, backend):
    run = runner(family, backend)
    placed = placed_video(run)
    whole, chunks = [[len(placed.token_ids)]], [[9]] * (len(placed.token_ids) // 9)
    chunks += [[len(placed.token_ids) % 9]] * (len(placed.token_ids) % 9 > 0)
    (found,), (chunked,) = run.logits([placed], whole), run.logits([placed], chunks)
    wanted = expected(family, placed)
    # The weights of interpolated position embeddings are in float32 here, as in transformers.
    tolerance = max(TOLERANCE[backend], 1e-6)
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < tolerance
    assert np.abs(chunked - wanted).max() / np.abs(wanted).max() < tolerance


def test_timestamps_are_those_of_transformers():
    run = runner("qwen3_vl", "reference")
    assert run.tokenizer is not None
    placed = placed_video(run)
    cells = (HEIGHT // 8) * (WIDTH // 8)
    text = run.tokenizer.decode(placed.token_ids, skip_special_tokens=False)
    group = f"<|vision_start|>{'<|video_pad|>' * cells}<|vision_end|>"
    assert f"and <0.5 seconds>{group}<2.0 seconds>{group} What" in text


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_each_frame_is_an_image_with_its_time_for_gemma4(backend):
    family = "gemma4:clipped"
    run = runner(family, backend)
    assert run.tokenizer is not None
    text = "See <|image|> and <|video|> What?"
    ids = run.tokenizer.encode(run.images.replaced(text), allow_special_text=True)
    placed = run.images.placed(ids, [picture(0), VideoSource(frames()[:2], 0.04)])
    (found,) = run.logits([placed], [[len(placed.token_ids)]])
    image, *groups = placed.media
    token_ids = list(placed.token_ids)
    for item, token_id in [(image, IMAGE_ID), *((group, VIDEO_ID) for group in groups)]:
        token_ids[item.start : item.end] = [token_id] * item.num_tokens
    text = run.tokenizer.decode(token_ids, skip_special_tokens=False)
    group = f"<|image>{'<|video|>' * groups[0].num_tokens}<image|>"
    assert f"and 00:00 {group} 00:25 {group} What" in text
    processor = processor_of(family)
    seen, shown = (
        processor(images=each, return_tensors="pt") for each in ([picture(0)], frames()[:2])
    )
    pixels, shown_pixels = (
        (2 * (made["pixel_values"] - 0.5)).double() / 2 + 0.5 for made in (seen, shown)
    )
    with double_precision():
        wanted = oracle(family)(
            input_ids=torch.tensor([token_ids]),
            pixel_values=pixels,
            image_position_ids=seen["image_position_ids"],
            pixel_values_videos=shown_pixels,
            video_position_ids=shown["image_position_ids"],
            num_frames_per_video=torch.tensor([2]),
            use_cache=False,
        ).logits[0]
    error = np.abs(found - wanted.numpy()).max() / wanted.abs().max()
    assert error < max(TOLERANCE[backend], 1e-6)


@pytest.mark.parametrize("total", [1, 31, 32, 33, 999])
def test_frames_are_sampled_evenly_as_by_transformers(total):
    metadata = SimpleNamespace(total_num_frames=total, fps=25.0)
    wanted = default_sample_indices_fn(metadata, num_frames=min(32, total))
    assert sample_frames(total, 25.0, rules(num_frames=32)) == list(wanted)


def rules(**changed: Any) -> VideoRules:
    image = image_rules({}, side=None, multiple=32, max_tokens=10_000)
    fields = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "group": 2, "is_total": True}
    fields |= {"min_pixels": 128 * 1024, "max_pixels": 768 * 1024} | changed
    return VideoRules(image=image, **fields)


@pytest.mark.parametrize(
    ("total", "fps"), [(1, 24.0), (7, 30.0), (100, 25.0), (999, 29.97), (9, 0.5), (50_000, 24.0)]
)
def test_frames_are_sampled_as_by_transformers(total, fps):
    own = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    wanted = processing.Qwen3VLVideoProcessor.sample_frames(own, metadata)
    assert sample_frames(total, fps, rules()) == list(wanted)


@pytest.mark.parametrize("size", [(480, 640), (33, 900), (20, 40), (1080, 1920)])
@pytest.mark.parametrize("num_frames", [2, 5, 64])
def test_frames_are_resized_as_by_transformers(num_frames, size):
    wanted = processing.smart_resize(
        num_frames, *size, factor=32, min_pixels=128 * 1024, max_pixels=768 * 1024
    )
    assert frame_size(num_frames, *size, rules()) == wanted


@pytest.mark.parametrize(
    ("video", "said"),
    [
        ([], "got 0 frames, expected 1 to 64"),
        ([picture(0)] * 65, "got 65 frames, expected 1 to 64"),
        ([picture(0), picture(1, 20, 20)], "got frames of 20 x 20 and 45 x 37 pixels"),
        (7, "got int, expected a list of frames"),
        ("data:video/jpeg;base64,AAAA", "the bytes are not a supported image"),
        ("/etc/passwd", "expected data URLs"),
    ],
    ids=lambda case: str(case)[:20] if isinstance(case, str) else "",
)
def test_what_is_no_video_is_refused(video, said):
    with pytest.raises(InvalidRequest, match=said) as error:
        runner("qwen3_vl", "reference").images.read([VideoSource(video)])
    assert error.value.hint


def test_a_file_is_decoded():
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 64, 48
        for index in range(30):
            image = np.full((48, 64, 3), 8 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    limits = ImageLimits(1, 1 << 20, 100_000, noun="video")
    found = decode_video(file.getvalue(), rules(), limits)
    assert (found.fps, found.total, list(found.indices)) == (10.0, 30, [0, 6, 12, 17, 23, 29])
    means = [np.asarray(image).mean() for image in found.images]
    np.testing.assert_allclose(means, [8 * index for index in found.indices], atol=6)
    for data in (b"no video", file.getvalue()[:300]):
        with pytest.raises(InvalidRequest, match="the file is damaged or not a supported video"):
            decode_video(data, rules(), limits)
