"""Lists supported families, formats, short names and cached models, and reports on a checkpoint
from its headers (`octavo models`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from octavo.api.errors import BackendUnavailable, ConfigError, OctavoError
from octavo.checkpoint.catalogue import CATALOGUE, find_downloaded, find_name, resolve_header
from octavo.checkpoint.family_cards import FamilyCard, find_card
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.gguf.gguf_families import FAMILIES as GGUF_FAMILIES
from octavo.checkpoint.open import open_header
from octavo.checkpoint.ports import Checkpoint, ModelHeader, TokenizerSource
from octavo.checkpoint.safetensors import DTYPES
from octavo.checkpoint.tensor_check import check_tensors
from octavo.config.engine_config import EngineConfig
from octavo.frontend.sampling_defaults import SamplingDefaults
from octavo.models.hf_config import ModelInfo
from octavo.models.registry import FAMILIES, ModelFamily
from octavo.program.program import Program
from octavo.quant.gguf import BLOCK_TYPES
from octavo.text.parsers.choice import choose_formats as formats_of_answers
from octavo.wiring.backend import build_backend
from octavo.wiring.model import (
    build_model_programs,
    derive_from,
    formats_by_weight,
    get_loaded_formats,
)
from octavo.wiring.sampling_defaults import sampling_defaults


class ShortName(NamedTuple):
    """A model of the catalogue."""

    name: str
    text: str
    license: str
    num_bytes: int
    path: Path | None
    """Path in the cache; None if it is not downloaded."""


class FamilyRow(NamedTuple):
    model_type: str
    family: ModelFamily
    architectures: tuple[str, ...]
    """GGUF architecture names of the family."""


class BackendVerdict(NamedTuple):
    """Whether a backend runs a model."""

    backend: str
    unsupported_reason: str | None
    """Reason why the backend does not run it; None if it does."""
    is_installed: bool = True


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Description of a checkpoint from its headers."""

    path: Path
    info: ModelInfo
    num_parameters: int
    formats: dict[str, int]
    """Number of parameters by storage format."""
    num_bytes: int
    """Size of the weight files; 0 if there is only config.json."""
    has_tokenizer: bool | None
    """None if unknown."""
    has_chat_template: bool
    tool_format: str | None
    """Tool call format; None if the chat template has none."""
    reasoning_format: str | None
    sampling: SamplingDefaults | None
    """Default sampling values; None for a model that does not generate, or if there is only
    config.json.
    """
    license: str | None
    card: tuple[str, FamilyCard] | None
    """Name and card of its family, if it has one."""
    verdicts: tuple[BackendVerdict, ...]

    @property
    def runs(self) -> bool:
        """Whether an installed backend runs it."""
        return any(verdict.unsupported_reason is None for verdict in self.verdicts)


def short_names() -> Iterator[ShortName]:
    for name, model in CATALOGUE.items():
        num_bytes = sum(file.num_bytes for file in model.files)
        yield ShortName(name, model.text, model.license, num_bytes, find_downloaded(name))


def cached_repositories() -> Iterator[tuple[str, int]]:
    """Yields the models in huggingface-hub's cache and their sizes in bytes."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    yield from sorted(
        (repo.repo_id, repo.size_on_disk) for repo in repositories if repo.repo_type == "model"
    )


def formats() -> Iterator[tuple[str, str]]:
    """Yields the supported file types with their weight formats."""
    yield "safetensors", ", ".join(DTYPES)
    kinds = [kind.name for kind in BLOCK_TYPES.values()]
    yield "GGUF", ", ".join(dict.fromkeys(kinds))


def families() -> Iterator[FamilyRow]:
    for model_type, family in FAMILIES.items():
        names = {name for name, row in GGUF_FAMILIES.items() if row.model_type == model_type}
        if family.gguf_as is not None:
            names.add(family.gguf_as)
        yield FamilyRow(model_type, family, tuple(sorted(names)))


def make_report(name: str) -> ModelReport:
    """Reports on a model from its headers; raises SetupError if it is damaged or not supported."""
    if name in CATALOGUE and find_downloaded(name) is None:
        raise ConfigError(f"{name} is not downloaded yet", hint=f"octavo pull {name}")
    header = open_header(resolve_header(name))
    config, info = derive_from(EngineConfig.from_options(model=name), header)
    programs = build_model_programs(info, header)
    if isinstance(header, Checkpoint):
        check_tensors(header, programs)
    sizes: Counter[str] = Counter()
    for weight, format_ in formats_by_weight(config, header, programs):
        sizes[format_] += prod(weight.shape)
    files, source = _get_files(header)
    template = None if source is None else source.chat_template
    tool_template = None if source is None else source.named_templates.get("tool_use")
    answers = formats_of_answers(template, None, None, tool_template)
    return ModelReport(
        path=header.path,
        info=info,
        num_parameters=sizes.total(),
        formats=dict(sizes.most_common()),
        num_bytes=sum(file.stat().st_size for file in files),
        has_tokenizer=source is not None if files else None,
        has_chat_template=template is not None,
        tool_format=None if answers.tools is None else answers.tools.name,
        reasoning_format=None if answers.reasoning is None else answers.reasoning.name,
        sampling=_sampling(config, header, programs, has_chat_template=template is not None),
        license=_license(header),
        card=_card(name, info.model_type, header),
        verdicts=tuple(_verdicts(name, header, programs)),
    )


def _get_files(header: ModelHeader) -> tuple[Sequence[Path], TokenizerSource | None]:
    """Returns the weight files and the tokenizer; none if there is only config.json."""
    if not isinstance(header, Checkpoint):
        return (), None
    return header.weight_files, header.tokenizer_source()


def _sampling(
    config: EngineConfig,
    header: ModelHeader,
    programs: Sequence[Program],
    *,
    has_chat_template: bool,
) -> SamplingDefaults | None:
    if not isinstance(header, Checkpoint) or "pooled" in programs[0].outputs:
        return None
    return sampling_defaults(
        config.model,
        header,
        has_chat_template=has_chat_template,
        has_encoder=config.model.max_encoder_len is not None,
    )


def _license(header: ModelHeader) -> str | None:
    """Returns the license in the GGUF header, or in the catalogue."""
    if isinstance(header, GgufCheckpoint):
        named = header.file.metadata.get("general.license")
        if isinstance(named, str):
            return named
    short = find_name(header.path)
    return None if short is None else CATALOGUE[short].license


def _card(name: str, model_type: str, header: ModelHeader) -> tuple[str, FamilyCard] | None:
    """Returns the family card by the model's short name, own name or given name."""
    own = header.config.get("_name_or_path")
    if isinstance(header, GgufCheckpoint):
        own = header.file.metadata.get("general.name")
    return find_card(model_type, find_name(header.path), own and str(own), name)


def _verdicts(
    name: str, header: ModelHeader, programs: Sequence[Program]
) -> Iterator[BackendVerdict]:
    """Checks each backend; torch only if native does not run the model, since importing it takes
    seconds.
    """
    native = _verdict("native", name, header, programs)
    yield native
    if native.unsupported_reason is not None:
        yield _verdict("torch", name, header, programs)
    yield _verdict("reference", name, header, programs)


def _verdict(
    backend: str, name: str, header: ModelHeader, programs: Sequence[Program]
) -> BackendVerdict:
    """Checks whether a backend runs a model."""
    config, _ = derive_from(EngineConfig.from_options(model=name, backend=backend), header)
    try:
        built = build_backend(config)
    except BackendUnavailable as error:
        return BackendVerdict(backend, _first_line(error), is_installed=False)
    try:
        for program in programs:
            built.check(program, get_loaded_formats(config, header, program))
    except OctavoError as error:
        return BackendVerdict(backend, _first_line(error))
    return BackendVerdict(backend, None)


def _first_line(error: OctavoError) -> str:
    return str(error).splitlines()[0]
