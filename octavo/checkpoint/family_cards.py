"""Reads the family cards: what to know before serving a popular model family.

The facts are in family_cards.toml: sampling values, chat template, tool and reasoning formats, EOS
tokens, notes and sizes. `octavo models NAME` prints a card and docs/generate.py writes its page. A
card changes no default; octavo/wiring/sampling_defaults.py chooses those.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

CARDS = Path(__file__).with_suffix(".toml")

Bits = Literal[4, 8, 16]
"""Bits per weight; 4 and 8 are `--quantization int4` and `int8`."""


class CardCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published checkpoint and the keys of its config.json that determine its size."""

    repository: str
    config: Mapping[str, Any]
    nulls: tuple[str, ...] = ()
    """Keys of config.json that are null, which TOML cannot express."""
    gguf: str | None = None
    """Repository with GGUF files of it."""

    @property
    def hf_config(self) -> dict[str, Any]:
        return {"torch_dtype": "bfloat16", **self.config, **dict.fromkeys(self.nulls)}


class CardSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling values that the maker recommends."""

    use: str
    """Checkpoints or mode that they are for."""
    values: Mapping[str, int | float] = {}
    """Values by the keys of generation_config.json; {} if `use` says it in words."""

    def describe(self) -> str:
        values = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"{self.use}: {values}" if values else self.use


class CardFlag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flag of `octavo serve` for this family."""

    flag: str
    use: str


class FamilyCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to know before serving a family."""

    title: str
    model_types: tuple[str, ...]
    """Model types of its checkpoints; several families may share one."""
    names: tuple[str, ...]
    """Parts of its checkpoints' names, in lower case and without punctuation."""
    license: str
    example: str
    """Model to name in `octavo serve`."""
    source: str
    """Address of a model card of the maker."""
    template: str
    """Chat template in words."""
    checkpoints: tuple[CardCheckpoint, ...]
    tools: tuple[str, ...] = ()
    """Names of tool-call formats (octavo/text/parsers/formats.py); () if it has none."""
    reasoning: str | None = None
    """Name of the reasoning format."""
    ends: tuple[str, ...] = ()
    """Tokens that end a response."""
    sampling: tuple[CardSampling, ...] = ()
    """Recommended values; () if the maker recommends none."""
    flags: tuple[CardFlag, ...] = ()
    notes: tuple[str, ...] = ()
    bits: tuple[Bits, ...] = (4, 8)
    """Precisions of the weights to state sizes for."""


@cache
def get_cards() -> dict[str, FamilyCard]:
    return msgspec.convert(tomllib.loads(CARDS.read_text("utf-8")), dict[str, FamilyCard])


def find_card(model_type: str, *names: str | None) -> tuple[str, FamilyCard] | None:
    """Returns the card of a checkpoint by the first of `names` that tells its family, and its key.

    Of several families in one name, the first counts: DeepSeek-R1-0528-Qwen3-8B is a DeepSeek.
    """
    cards = [item for item in get_cards().items() if model_type in item[1].model_types]
    for name in filter(None, names):
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        found = [
            (plain.index(part), item) for item in cards for part in item[1].names if part in plain
        ]
        if found:
            return min(found, key=lambda each: each[0])[1]
    return None
