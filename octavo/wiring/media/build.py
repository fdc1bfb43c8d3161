"""Builds the reader of media in prompts of the frontend, and the towers of the worker that encode
them. A model split over several ranks supports text only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.api.errors import ConfigError
from octavo.checkpoint.dummy import DummyWeights
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import expand_path, path_exists
from octavo.engine.protocol.prompt_limits import PromptLimits
from octavo.executor.base import Backend, BackendOptions, Footprint
from octavo.executor.kv import BLOCK_SIZE
from octavo.media.features import SoundFeatures, UsmFeatures, WhisperFeatures
from octavo.media.limits import ImageLimits
from octavo.media.prompt_embeds import PromptEmbedsReader
from octavo.media.prompt_media import PromptMediaReader
from octavo.media.sound import PromptAudioReader
from octavo.models.audio import AUDIO_TOWER, AudioLayout
from octavo.models.hf_config import HfConfig
from octavo.models.registry import audio_layout, build_programs, image_layout
from octavo.models.vision import NEWLINE, TOWER
from octavo.program.passes.input_rows import find_embedding
from octavo.program.program import Program
from octavo.text.ports import MediaReader, Tokenizer
from octavo.wiring.media.images import count_patches, make_image_reader, make_image_tower
from octavo.wiring.speculation.draft import add_footprints
from octavo.worker.media.audio_tower import AudioTower
from octavo.worker.media.tower import EmbedsTower, Tower, TowerPrograms, Towers

IMAGE_PROGRAMS = (*TOWER, NEWLINE)


def get_media_kinds(config: EngineConfig, checkpoint: ModelHeader) -> set[str]:
    """Returns the kinds of media that the model reads in prompts with this config."""
    if config.backend.num_stage_ranks > 1:
        return set()
    layout = image_layout(checkpoint.config)
    seen = set() if layout is None else {"image"}
    if layout is not None and layout.video is not None:
        seen.add("video")
    return seen if audio_layout(checkpoint.config) is None else seen | {"audio"}


def make_media_reader(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> MediaReader | None:
    """Builds the reader of media in prompts; None if the model reads text only."""
    kinds = get_media_kinds(config, checkpoint)
    if not kinds:
        return None
    media = config.media
    folder = None if media.media_dir is None else expand_path(media.media_dir)
    if folder is not None and not (path_exists(folder) and folder.is_dir()):
        raise ConfigError(
            f"media_dir: {folder} is not a directory",
            hint="create the directory, or omit media_dir",
        )
    limits = ImageLimits(
        media.max_images,
        media.max_image_bytes,
        media.max_image_pixels,
        folder,
        media.allow_media_urls,
    )
    images = make_image_reader(config, checkpoint, tokenizer, limits)
    layout = audio_layout(checkpoint.config)
    audio = None
    if layout is not None:
        own = replace(
            limits, max_images=media.max_audios, max_bytes=media.max_audio_bytes, noun="audio"
        )
        audio = _audio_reader(layout, tokenizer, own)
    return None if images is None and audio is None else PromptMediaReader(images, audio)


def make_embeds_reader(
    config: EngineConfig, build_program: Callable[[], Program], limits: PromptLimits
) -> PromptEmbedsReader | None:
    """Builds the reader of prompt embeddings; None if the engine does not accept any."""
    if not config.model.enable_prompt_embeds:
        return None
    return PromptEmbedsReader(find_embedding(build_program()).out.width, limits.max_model_len)


def _audio_reader(
    layout: AudioLayout, tokenizer: Tokenizer | None, limits: ImageLimits
) -> PromptAudioReader:
    if layout.features == "usm":
        features: SoundFeatures = UsmFeatures(layout.num_bands, layout.window_rows)
    else:
        features = WhisperFeatures(layout.num_bands, layout.window_rows, layout.is_padded)
    replacements = {}
    if tokenizer is not None:
        written = layout.written or (layout.token_id,)
        replacements[tokenizer.token_text(layout.token_id)] = "".join(
            map(tokenizer.token_text, written)
        )
    return PromptAudioReader(
        limits=limits,
        features=features,
        token_id=layout.token_id,
        row_id=layout.token_id if layout.row_id is None else layout.row_id,
        rows_per_token=layout.rows_per_token,
        replacements=replacements,
    )


def load_towers(
    config: EngineConfig,
    checkpoint: Checkpoint,
    options: BackendOptions,
    make_backend: Callable[[BackendOptions], Backend],
) -> Towers | None:
    """Loads the towers, each with its own backend; None if the model has none."""
    parts = {
        kind: _prepare(
            config, checkpoint, programs, make_backend(_tower_options(options, num_rows))
        )
        for kind, (num_rows, programs) in _towers(config, checkpoint).items()
    }
    seen, heard = image_layout(checkpoint.config), audio_layout(checkpoint.config)
    towers: dict[str, Tower] = {}
    if "image" in parts and seen is not None:
        towers["image"] = make_image_tower(config, checkpoint, seen, parts["image"])
    if "audio" in parts and heard is not None:
        towers["audio"] = AudioTower(heard, parts["audio"])
    if config.model.enable_prompt_embeds:
        towers["embeds"] = EmbedsTower(
            HfConfig(checkpoint.config).number("embedding_multiplier", 1.0)
        )
    return Towers(towers) if towers else None


def with_towers(
    config: EngineConfig,
    header: ModelHeader,
    footprint: Footprint,
    options: BackendOptions,
    make_backend: Callable[[BackendOptions], Backend],
) -> Footprint:
    """Adds the memory of the towers, sized for the largest image and a window of audio."""
    for num_rows, programs in _towers(config, header).values():
        backend = make_backend(_tower_options(options, num_rows))
        num_blocks = -(-num_rows // BLOCK_SIZE)
        for program in programs:
            formats = loaded_formats(header, config.model.dtype, None, program)
            needed = backend.footprint(program, formats)
            kv_bytes = num_blocks * sum(layout.block_bytes for layout in needed.kv_layouts)
            needed = replace(needed, step_bytes=needed.step_bytes + kv_bytes)
            footprint = add_footprints(footprint, needed, program.name)
    return footprint


def tower_programs(checkpoint: ModelHeader) -> list[Program]:
    """Returns the Programs of the towers; [] if the model has none."""
    has_images = image_layout(checkpoint.config) is not None
    if not has_images and audio_layout(checkpoint.config) is None:
        return []
    return _pick(build_programs(checkpoint.config), (*IMAGE_PROGRAMS, *AUDIO_TOWER))


def _towers(config: EngineConfig, checkpoint: ModelHeader) -> dict[str, tuple[int, list[Program]]]:
    """Returns the most rows and the Programs of each tower by kind of media."""
    if not get_media_kinds(config, checkpoint):
        return {}
    programs = build_programs(checkpoint.config)
    towers = {}
    seen, heard = image_layout(checkpoint.config), audio_layout(checkpoint.config)
    if seen is not None:
        towers["image"] = (count_patches(config, checkpoint, seen), _pick(programs, IMAGE_PROGRAMS))
    if heard is not None:
        towers["audio"] = (heard.window_rows, _pick(programs, AUDIO_TOWER))
    return towers


def _pick(programs: dict[str, Program], names: tuple[str, ...]) -> list[Program]:
    return [programs[name] for name in names if name in programs]


def _prepare(
    config: EngineConfig, checkpoint: Checkpoint, programs: list[Program], backend: Backend
) -> TowerPrograms:
    is_dummy = config.model.load_format == "dummy"
    prepared = {}
    for program in programs:
        formats = loaded_formats(checkpoint, config.model.dtype, None, program)
        backend.check(program, formats)
        weights = (
            DummyWeights(formats) if is_dummy else WeightReader(checkpoint, config.model.dtype)
        )
        prepared[program.name] = backend.prepare_program(program, weights.load)
    return TowerPrograms({program.name: program for program in programs}, prepared, backend)


def _tower_options(options: BackendOptions, num_rows: int) -> BackendOptions:
    """Returns the options of a tower's backend, sized for its most rows."""
    return replace(
        options,
        kv_cache_dtype="auto",
        max_tokens=num_rows,
        max_requests=num_rows,
        max_context=num_rows,
        hooks=(),
        offload=None,
        batch_invariant=False,
    )
