"""The tiny model of every family in the registry that transformers has, whatever it computes: as
`tiny_models.py` has it, and encoders and models that see beside them.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.dump_older_configs import MISTRAL
from tests.support.tiny_encoders import encoder, save_encoder
from tests.support.tiny_models import (
    DISTINCT,
    FAMILIES,
    TinyModel,
    session_directory,
    tiny_model,
)
from tests.support.tiny_other_shapes import AUDIO_TEXT, CONFIGS, ENCODERS, IMAGE_TEXT, TEXT_ONLY
from tests.support.tiny_shapes import ENCODER_DECODERS

NESTED = tuple(name for name in IMAGE_TEXT | AUDIO_TEXT if ":" not in name)
"""Families of a tower and the decoder of another family."""
EVERY_FAMILY = tuple(
    sorted(
        {
            *FAMILIES,
            *ENCODERS,
            *ENCODER_DECODERS,
            *CONFIGS,
            *NESTED,
            *TEXT_ONLY,
            "mistral",
        }
    )
)
WITHOUT_ORACLE = ("chatglm", "new")
"""Families that transformers does not have, or has under another name."""
MODULES = ("modules.json", "1_Pooling", "sentence_bert_config.json")
"""Files and folders beside an encoder's config that say how it pools."""
OLDER: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "older_configs.json").read_text()
)
"""Configs of the tiny models as transformers 4.57 writes them (`dump_older_configs.py`)."""


def each_family_of_all() -> list[Any]:
    """Returns all families for `pytest.mark.parametrize`; those that add nothing are slow tests."""
    fast = (*DISTINCT, "bert", "t5", "qwen2_vl")
    return [
        family if family in fast else pytest.param(family, marks=pytest.mark.slow)
        for family in EVERY_FAMILY
    ]


@cache
def tiny_of(family: str) -> TinyModel:
    """Returns the tiny model of a family; an encoder pools the mean."""
    if family in ENCODERS:
        path = save_encoder(session_directory() / f"tiny-{family}", family)
        return TinyModel(json.loads((path / "config.json").read_text()), path, encoder(family))
    options = (CONFIGS | IMAGE_TEXT | AUDIO_TEXT | TEXT_ONLY).get(
        family, MISTRAL if family == "mistral" else {}
    )
    return tiny_model(family, **options)


def copy_modules(source: Path, target: Path) -> None:
    """Copies the files that say how an encoder pools."""
    for name in MODULES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).exists():
            shutil.copy(source / name, target / name)


def newer_configs() -> dict[str, dict[str, Any]]:
    """Returns each family's config as transformers 5 saves it."""
    return {family: tiny_of(family).config for family in EVERY_FAMILY}
