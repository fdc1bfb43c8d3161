"""`octavo models`: lists supported and cached models. With a family, prints its card; with a model,
the same as `octavo show`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.config.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.checkpoint.family_cards import FamilyCard

WIDTH = 14
"""Width of the name column."""

SHORT_NAME_WIDTH = 17
"""Width of the column of short names; the longest has 15 characters."""

FAMILY_WIDTH = 20
"""Width of the column of families; the longest has 18 characters."""


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Family, short name, path (config.json is enough) or Hugging Face repository"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
) -> None:
    """List supported families, formats and models. For a family, print checkpoints, flags and
    sampling values. For a model, print the same as `octavo show`.
    """
    if model is not None:
        from octavo.checkpoint.family_cards import get_cards
        from octavo.config.paths import path_exists

        if model in get_cards() and not path_exists(Path(model)):
            return _print_card(model, get_cards()[model], json=json)
        from octavo.cli.show import show

        return show(model, json=json)
    if json:
        import json as json_format

        print(json_format.dumps(_listing()))
    else:
        print("\n".join(_list_lines()))


def _listing() -> dict[str, Any]:
    from octavo.checkpoint.family_cards import get_cards
    from octavo.wiring.survey import cached_repositories, families, formats, short_names

    return {
        "short_names": [
            row._asdict() | {"path": None if row.path is None else str(row.path)}
            for row in short_names()
        ],
        "cached": [{"name": name, "bytes": size} for name, size in cached_repositories()],
        "families": [
            {
                "model_type": row.model_type,
                "models": row.family.models,
                "kind": row.family.kind,
                "native": row.family.native,
                "gguf": list(row.architectures),
            }
            for row in families()
        ],
        "formats": dict(formats()),
        "cards": {name: card.title for name, card in get_cards().items()},
    }


def _list_lines() -> Iterator[str]:
    from octavo.checkpoint.family_cards import get_cards
    from octavo.wiring.survey import cached_repositories, families, formats, short_names

    yield "short names"
    for known in short_names():
        state = "fetched" if known.path else f"octavo pull {known.name}"
        size = format_bytes(known.num_bytes)
        yield f"  {known.name:<{SHORT_NAME_WIDTH}}{known.text} ({known.license}), {size}: {state}"
    cached = list(cached_repositories())
    if cached:
        yield "Hugging Face repositories in the cache"
        for name, num_bytes in cached:
            yield f"  {name}, {format_bytes(num_bytes)}"
    yield "popular families (octavo models NAME prints sampling values, formats, notes and sizes)"
    for name, card in get_cards().items():
        yield f"  {name:<{SHORT_NAME_WIDTH}}{card.title}"
    yield "families (every one runs on torch and reference)"
    for row in families():
        backends = "native" if row.family.native else "torch"
        gguf = f"; GGUF {', '.join(row.architectures)}" if row.architectures else ""
        kind = "" if row.family.kind == "decoder" else f", {row.family.kind}"
        yield f"  {row.model_type:<{FAMILY_WIDTH}}{backends:<8}{row.family.models}{kind}{gguf}"
    yield "formats"
    for name, text in formats():
        yield f"  {name:<{WIDTH}}{text}"


def _print_card(name: str, card: FamilyCard, *, json: bool) -> None:
    """Prints a card, then the size of each checkpoint as soon as it is computed."""
    from octavo.wiring.family_memory import KV_TOKENS, estimate_memory

    sizes = (
        (checkpoint, estimate_memory(checkpoint, card.bits)) for checkpoint in card.checkpoints
    )
    if json:
        import json as json_format
        from dataclasses import asdict

        import msgspec

        checkpoints = [
            {"repository": checkpoint.repository, "gguf": checkpoint.gguf, **asdict(size)}
            for checkpoint, size in sizes
        ]
        print(json_format.dumps(msgspec.to_builtins(card) | {"checkpoints": checkpoints}))
        return
    print("\n".join(_card_lines(name, card)))
    for checkpoint, size in sizes:
        weights = ", ".join(
            f"{bits} bits {format_bytes(num_bytes)}"
            for bits, num_bytes in size.weight_bytes.items()
        )
        kv = f", KV of {KV_TOKENS:,} tokens {format_bytes(size.kv_bytes)}" if size.kv_bytes else ""
        print(f"  {checkpoint.gguf or checkpoint.repository}")
        print(
            f"    {size.num_parameters / 1e6:,.0f} M parameters, context"
            f" {size.max_context_tokens:,}: {weights}{kv}",
            flush=True,
        )


def _card_lines(name: str, card: FamilyCard) -> Iterator[str]:
    yield f"{name}: {card.title}, {card.license}"
    facts = {
        "model types": [", ".join(card.model_types)],
        "chat template": [card.template],
        "tool format": [", ".join(card.tools)],
        "reasoning": [card.reasoning or ""],
        "ends with": [" ".join(card.ends)],
        "recommended": [sampling.describe() for sampling in card.sampling],
        "flags": [f"{sampling.flag} ({sampling.use})" for sampling in card.flags],
        "notes": card.notes,
        "model card": [card.source],
        "serve it": [f"octavo serve {card.example}"],
    }
    for fact, texts in facts.items():
        for text in filter(None, texts):
            yield f"  {fact:<{WIDTH}}{_plain(text)}"
            fact = ""
    yield "checkpoints"


def _plain(text: str) -> str:
    """Returns a card's text without Markdown markup."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
