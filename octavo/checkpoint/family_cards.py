"""Reads the family cards: what to know before serving a popular model family.

The facts are in family_cards.toml: sampling values, chat template, tool and reasoning formats, EOS
tokens, notes and sizes. `octavo models NAME` prints a card and docs/generate.py writes its page. A
card does not change defaults; octavo/wiring/sampling_defaults.py chooses these.
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
    """Keys of config.json with the value null, which TOML cannot express."""
    gguf: str | None = None
    """Repository with GGUF files of the checkpoint."""

    @property
    def hf_config(self) -> dict[str, Any]:
        return {"torch_dtype": "bfloat16", **self.config, **dict.fromkeys(self.nulls)}


class CardSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling values that the maker recommends."""

    use: str
    """Checkpoints or mode to which they apply."""
    values: Mapping[str, int | float] = {}
    """Values by the keys of generation_config.json; {} if `use` describes them in words."""

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
    """Model name for the example command `octavo serve`."""
    source: str
    """URL of the maker's model card."""
    template: str
    """Description of the chat template."""
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
    """Weight precisions for which sizes are shown."""


@cache
def get_cards() -> dict[str, FamilyCard]:
    return msgspec.convert(tomllib.loads(CARDS.read_text("utf-8")), dict[str, FamilyCard])


def find_card(model_type: str, *names: str | None) -> tuple[str, FamilyCard] | None:
    """Returns the key and card of the family to which the first matching one of `names` belongs;
    None if there is none.

    If a name contains several families, the first one counts: DeepSeek-R1-0528-Qwen3-8B is a
    DeepSeek.
    """
    cards = [item for item in get_cards().items() if model_type in item[1].model_types]
    for name in filter(None, names):
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        matches = [
            (plain.index(part), item) for item in cards for part in item[1].names if part in plain
        ]
        if matches:
            return min(matches, key=lambda each: each[0])[1]
    return None
