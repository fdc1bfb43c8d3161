"""Description of a model that is not loaded, from its files' headers.

Reads no weights and builds no tokenizer, so it takes a fraction of a second. Downloads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.api.pooling_params import PoolingTask
from octavo.api.sampling_params import SamplingParams
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.ports import TokenizerSource
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import ModelFacts
from octavo.text.infill import find_infill_format
from octavo.text.parsers.choice import choose_formats
from octavo.wiring.media.build import get_media_kinds
from octavo.wiring.model import Model, open_model
from octavo.wiring.sampling_defaults import sampling_defaults
from octavo.wiring.tokenizer_files import find_tokenizer
from octavo.wiring.transcription import accepts_audio


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Size, format and capabilities of a model."""

    facts: ModelFacts
    max_model_len: int
    """Context length from files and options; the loaded model's may be lower if memory is short."""
    pools: PoolingTask | None
    media: frozenset[str]
    """Media types that it accepts besides text: "image", "video" and "audio" in prompts, "speech"
    if it transcribes.
    """
    chat_template: str
    """"" if it has none."""
    infills: bool
    reasons: bool
    sampling: SamplingParams | None
    """Default params of completions; None for a model that does not generate."""


def read_outline(path: Path, options: Mapping[str, Any]) -> ModelOutline:
    """Reads the headers of a local model; raises SetupError if it is damaged or not supported."""
    model = open_model(EngineConfig.from_options(**{**options, "model": str(path)}))
    named = model.config.model
    source = None if named.skip_tokenizer_init else find_tokenizer(named, model.checkpoint)
    template = "" if source is None else named.chat_template or source.chat_template or ""
    tool_template = None if source is None else source.named_templates.get("tool_use")
    answers = choose_formats(
        template or None, named.tool_call_parser, named.reasoning_parser, tool_template
    )
    pools = model.pools()
    return ModelOutline(
        facts=model.facts(),
        max_model_len=named.max_model_len or model.info.max_context_tokens,
        pools=None if pools is None else pools.task,
        media=_media(model),
        chat_template=template,
        infills=source is not None and _infills(source),
        reasons=answers.reasoning is not None,
        sampling=None if pools is not None else _sampling(model, template),
    )


def _sampling(model: Model, template: str) -> SamplingParams:
    has_encoder = model.config.model.max_encoder_len is not None
    return sampling_defaults(
        model.config.model,
        model.checkpoint,
        has_chat_template=bool(template),
        has_encoder=has_encoder,
    ).params


def _media(model: Model) -> frozenset[str]:
    kinds = get_media_kinds(model.config, model.checkpoint)
    return frozenset(kinds | {"speech"} if accepts_audio(model) else kinds)


def _infills(source: TokenizerSource) -> bool:
    if source.vocabulary is not None:
        ids = {text.decode(errors="replace"): i for i, text in enumerate(source.vocabulary.tokens)}
    elif source.json is not None:
        added = read_json(source.json).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
    else:
        ids = {}
    return find_infill_format(ids.get) is not None
