"""Models that read images give transformers' logits, and the same bits however a prompt is cut.

The oracle computes in float64 throughout, over the pixels of transformers' own image processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from octavo.api.sampling_params import SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.step import NewRequest, ScheduledRequest, StepPlan
from octavo.executor.kv import BLOCK_SIZE
from octavo.frontend.media import MediaInputs, PromptWithMedia
from octavo.program.ops import num_position_axes
from octavo.wiring.grammars import lazy_grammars
from octavo.wiring.media.build import make_media_reader
from octavo.wiring.model import build_tokenizer, load_model, open_model
from octavo.worker.input_batch import InputBatch
from octavo.worker.media.image_tower import square_views
from octavo.worker.media.patches import cut_patches
from octavo.worker.media.step_media import StepMedia, get_positions
from octavo.worker.model_input import gather
from tests.support.tiny_images import ALL, IMAGE_ID, QWEN, picture, processor_of, seeing_model
from tests.support.tiny_models import double_precision, in_float64

torch.set_num_threads(1)

BACKENDS = ("reference", "torch", "native")
TOLERANCE = {"reference": 1e-9, "torch": 3e-5, "native": 3e-5}
MAX_BLOCKS = 24


class SeeingRunner:
    """The worker's half of an engine over a tiny model, driven step by step."""

    def __init__(self, path: Path, backend: str) -> None:
        options = {"model": str(path), "backend": backend, "threads": 2}
        options |= {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32"}
        model = open_model(EngineConfig.from_options(**options))
        self.tokenizer = build_tokenizer(model)
        reader = make_media_reader(model.config, model.checkpoint, self.tokenizer)
        self.images = MediaInputs(reader)
        self.loaded = load_model(
            model, lambda text: None, lazy_grammars(model, lambda: self.tokenizer)
        )
        assert self.loaded.towers is not None
        axes = num_position_axes(self.loaded.program)
        self.media = StepMedia(self.loaded.towers, self.loaded.rows, num_axes=axes)
        (self.runnable,) = self.loaded.runnables.values()

    def placed(self, text: str, *seeds: int) -> PromptWithMedia:
        """Returns the tokens of a text with images, as the front makes them."""
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(self.images.replaced(text), allow_special_text=True)
        sizes = [(45, 37), (30, 52), (20, 20)]
        images = [picture(seed, *sizes[seed % 3]) for seed in seeds]
        return self.images.placed(ids, images)

    def logits(
        self, requests: Sequence[PromptWithMedia], chunks: Sequence[Sequence[int]]
    ) -> list[NDArray]:
        """Returns the logits of every token of each request; `chunks` holds for each step the
        number of tokens that it computes of each.
        """
        rows = self.loaded.rows
        kv = self.loaded.backend.allocate(
            self.loaded.layouts, [MAX_BLOCKS * len(requests)] * len(self.loaded.layouts)
        )
        encodes = {pixels.digest: pixels for request in requests for pixels in request.pixels}
        plan = StepPlan(0, [], [], [], [], encodes=list(encodes.values()))
        assert self.media.apply(plan) == []
        for index, request in enumerate(requests):
            name = str(index)
            rows.add(
                NewRequest(name, request.token_ids, len(request.token_ids), SamplingParams(), 0,
                       media=request.media)
            )  # fmt: skip
            blocks = np.arange(index * MAX_BLOCKS, (index + 1) * MAX_BLOCKS)
            table = rows.block_tables[:, row_of(rows, index)]
            table[:] = -1
            table[:, : min(MAX_BLOCKS, table.shape[1])] = blocks[: table.shape[1]]
            for group, layout in enumerate(self.loaded.layouts):
                if layout.group.kind == "state":  # a row has one block, which is repeated
                    table[group] = blocks[0]
        found: list[list[NDArray]] = [[] for _ in requests]
        ends = [0] * len(requests)
        for counts in chunks:
            present = [index for index, count in enumerate(counts) if count]
            for index in present:
                ends[index] += counts[index]
            batch = gather(
                rows,
                np.array([row_of(rows, index) for index in present], np.intp),
                np.array([ends[index] for index in present], np.int32),
                np.cumsum([0, *(counts[index] for index in present)]).astype(np.int32),
            )
            self.media.add(batch)
            batch.sample_rows = np.arange(len(batch.token_ids), dtype=np.int32)
            logits = self.runnable.run(batch, kv).arrays["logits"]
            for at, index in enumerate(present):
                found[index].append(logits[batch.query_starts[at] : batch.query_starts[at + 1]])
        for index in range(len(requests)):
            rows.free(str(index), None)
        assert ends == [len(request.token_ids) for request in requests]
        return [np.concatenate(parts) for parts in found]


def row_of(rows: InputBatch, index: int) -> int:
    """Returns the permanent row of a request by its index."""
    (row,) = rows.indices([ScheduledRequest(str(index), 0, 0, [])])
    return int(row)


@cache
def runner(family: str, backend: str) -> SeeingRunner:
    return SeeingRunner(seeing_model(family).path, backend)


@cache
def oracle(family: str) -> Any:
    return in_float64(seeing_model(family).tiny.model)


READ = ("image_grid_thw", "image_sizes", "pixel_attention_mask", "batch_num_images")
READ += ("image_position_ids",)
"""Inputs of transformers' models besides pixels that their image processors make."""
EXTRA = {
    "gemma3": lambda kinds: {"token_type_ids": kinds},
    "paligemma": lambda kinds: {"token_type_ids": kinds * 0},
    "paligemma:2": lambda kinds: {"token_type_ids": kinds * 0},
}
"""Inputs of transformers' models that their image processors do not make."""


def expected(family: str, placed: PromptWithMedia, seeds: Sequence[int]) -> NDArray:
    """Returns transformers' logits of a prompt with images."""
    sizes = [(45, 37), (30, 52), (20, 20)]
    images = [picture(seed, *sizes[seed % 3]) for seed in seeds]
    given = [images] if family == "llava_onevision" else images  # of one prompt
    made = processor_of(family)(images=given, return_tensors="pt")
    ids = torch.tensor([placed.token_ids])
    if family.startswith("gemma4"):  # whose rows have the token for padding here
        for item in placed.media:
            ids[0, item.start : item.end] = IMAGE_ID
    kinds = (ids == IMAGE_ID).int()
    inputs = {name: made[name] for name in made if name in READ}
    inputs["pixel_values"] = made["pixel_values"].double()
    if family.startswith("gemma4"):  # scaled in fp32
        inputs["pixel_values"] = (2 * (made["pixel_values"] - 0.5)).double() / 2 + 0.5
    if family in QWEN:
        inputs["mm_token_type_ids"] = kinds
        inputs |= interpolation(oracle(family).model.visual, made["image_grid_thw"])
    inputs |= EXTRA.get(family, lambda kinds: {})(kinds)
    with double_precision():
        logits = oracle(family)(input_ids=ids, use_cache=False, **inputs).logits
    found: NDArray = logits[0].numpy()
    return found


def interpolation(tower: Any, grid: torch.Tensor) -> dict[str, Any]:
    """Returns the weights of interpolated position embeddings in float32, as transformers computes
    them; {} for a tower without.
    """
    if not hasattr(tower, "num_grid_per_side"):
        return {}
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    return {"image_interp_indices": indices, "image_interp_weights": weights}


def text_of(family: str) -> str:
    place = seeing_model(family).place
    return f"Look: {place} and then {place}. What is the difference between the two of them?"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ALL)
def test_logits_equal_transformers(family, backend):
    placed = runner(family, backend).placed(text_of(family), 0, 1)
    (found,) = runner(family, backend).logits([placed], [[len(placed.token_ids)]])
    wanted = expected(family, placed, (0, 1))
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    # the middle of a range that rows are clipped to is rounded to fp32
    assert error < (1e-6 if "clipped" in family else 0) + TOLERANCE[backend]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiles_are_packed_as_by_transformers(seed):
    """OneVision divides only an image that is alone into tiles, whose rows it may scale down."""
    family = "llava_onevision"
    placed = runner(family, "reference").placed("Look: <image>", seed)
    (found,) = runner(family, "reference").logits([placed], [[len(placed.token_ids)]])
    wanted = expected(family, placed, (seed,))
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < TOLERANCE["torch"]


@pytest.mark.parametrize("family", ALL)
def test_pixels_equal_those_of_transformers_processor(family):
    run = runner(family, "reference")
    (image,) = run.images.read([picture(1, 30, 52)])
    made = processor_of(family)(images=[picture(1, 30, 52)], return_tensors="np")
    assert run.loaded.towers is not None
    tower: Any = run.loaded.towers.by_kind["image"]
    wanted = np.asarray(made["pixel_values"])
    patches = cut_patches(image.pixels[0], tower.layout, tower.scale)
    if family.startswith("gemma4"):
        at = np.asarray(made["image_position_ids"])[0].tolist()
        order = [at.index([column, row]) for row, column in patches.positions.T.tolist()]
        found, wanted = patches.rows, 2 * wanted[0, order] - 1
    elif wanted.ndim >= 4:
        views = wanted.reshape(-1, *wanted.shape[-3:])
        pixels = [view for one in image.pixels for view in square_views(one)]
        assert len(views) == len(pixels)
        size, cell = tower.layout.patch_size, tower.layout.cell
        num_pixels = 3 * size * size
        cut = [
            view[:, : rows * size * cell, : columns * size * cell].reshape(
                3, rows, cell, size, columns, cell, size
            )
            for view, one in zip(views, pixels, strict=True)
            for rows, columns in [tower.layout.get_grid(one.height, one.width)]
        ]
        wanted = np.concatenate(
            [one.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, num_pixels) for one in cut]
        )
        found = np.concatenate(
            [cut_patches(view, tower.layout, tower.scale).rows for view in pixels]
        )
    else:
        pixels = patches.rows[:, : wanted.shape[-1]]
        units = pixels.reshape(len(patches.cell_order), -1)
        found = units[patches.cell_order].reshape(wanted.shape)
        assert image.media[0].grid == tuple(
            np.asarray(made["image_grid_thw"])[0, 1:] // tower.layout.cell
        )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ALL)
def test_alone_batched_and_chunked_are_the_same_bits(family):
    run = runner(family, "native")
    first = run.placed(text_of(family), 0, 1)
    second = run.placed(f"{seeing_model(family).place}!", 2)
    third = run.placed("no image at all, but a rather long text about the weather")
    requests = [first, second, third]
    lengths = [len(request.token_ids) for request in requests]
    together = run.logits(requests, [lengths])
    for request, wanted in zip(requests, together, strict=True):
        (alone,) = run.logits([request], [[len(request.token_ids)]])
        np.testing.assert_array_equal(alone, wanted)
    steps = chunks_of(first, [7] * 60)
    (chunked,) = run.logits([first], [[count] for count in steps])
    np.testing.assert_array_equal(chunked, together[0])


def chunks_of(request: PromptWithMedia, sizes: Sequence[int]) -> list[int]:
    """Returns sizes of chunks that end inside no image whose tokens are computed together."""
    steps, end, length = [], 0, len(request.token_ids)
    for size in sizes:
        start, end = end, min(length, end + size)
        for item in request.media:
            if item.is_whole and item.start < end < item.end:
                end = item.start if start < item.start else item.end
        if end > start:
            steps.append(end - start)
    return steps


def test_positions_turn_by_time_row_and_column():
    run = runner("qwen2_vl", "reference")
    placed = run.placed(text_of("qwen2_vl"), 0, 1)
    made = processor_of("qwen2_vl")(images=[picture(0, 45, 37), picture(1, 30, 52)])
    ids = torch.tensor([placed.token_ids])
    wanted, _ = oracle("qwen2_vl").model.get_rope_index(
        ids, (ids == IMAGE_ID).int(), torch.tensor(np.asarray(made["image_grid_thw"]))
    )
    key_indices = np.arange(len(placed.token_ids), dtype=np.int32)
    np.testing.assert_array_equal(get_positions(key_indices, placed.media, 3), wanted[:, 0].numpy())


def test_blocks_are_no_smaller_than_what_tests_cut():
    """Says that the prompts span several blocks, an image's end among them."""
    placed = runner("qwen2_vl", "reference").placed(text_of("qwen2_vl"), 0, 1)
    assert placed.media[0].start // BLOCK_SIZE < placed.media[0].end // BLOCK_SIZE
