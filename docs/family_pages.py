"""Pages of docs/models/, one for each family card, with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from tables import table

from octavo.checkpoint.family_cards import Bits, CardCheckpoint, FamilyCard, get_cards
from octavo.config.sizes import format_bytes
from octavo.wiring.family_memory import KV_TOKENS, QUANTIZATION, CheckpointMemory, estimate_memory
from octavo.wiring.survey import families

FOLDER = Path(__file__).parent / "models"
INDEX = "README.md"
DEFAULTS = "[default values](../guides/models.md#default-sampling-parameters)"


def family_page(name: str) -> str:
    """Returns a family's page."""
    card = get_cards()[name]
    return "\n\n".join(_parts(name, card))


def index_page() -> str:
    rows = [
        (f"[{card.title}]({_file(name)})", f"`octavo models {name}`", card.license)
        for name, card in get_cards().items()
    ]
    return "\n\n".join(
        [
            "# Popular model families",
            "Each page lists checkpoints, flags, chat template, tool and reasoning formats,"
            " recommended sampling values and memory at 4 and 8 bits. `octavo models NAME` prints"
            " the same facts. [Models](../guides/models.md) lists all supported families.",
            table(("family", "in the terminal", "license"), rows),
        ]
    )


def page_files() -> dict[str, str]:
    """Returns the name of each page's file by the family's name."""
    return {name: _file(name) for name in get_cards()}


def _file(name: str) -> str:
    return f"{name.replace('.', '-')}.md"


def _parts(name: str, card: FamilyCard) -> Iterator[str]:
    yield f"# {card.title}"
    yield f"    octavo serve {card.example}"
    yield f"`octavo models {name}` prints these facts. They come from the [maker's model card]" + (
        f"({card.source}) and from the files published with the models."
    )
    yield table(("", ""), _facts(card))
    if card.sampling:
        yield from _sampling(card)
    if card.flags:
        yield "## Flags"
        yield table(("flag", "use"), ((f"`{each.flag}`", each.use) for each in card.flags))
    if card.notes:
        yield "## Notes"
        yield "\n".join(
            fill(each, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
            for each in card.notes
        )
    yield from _memory(card)


def _facts(card: FamilyCard) -> Iterator[tuple[str, str]]:
    architectures = {
        gguf
        for row in families()
        if row.model_type in card.model_types
        for gguf in row.architectures
    }
    yield "license", card.license
    yield "`model_type`", ", ".join(f"`{each}`" for each in card.model_types)
    if architectures:
        yield "GGUF architecture", ", ".join(sorted(architectures))
    yield "chat template", card.template
    if card.tools:
        yield "tool-call format", f"{_names(card.tools)} ([formats](../reference/formats.md))"
    if card.reasoning:
        yield "reasoning format", _names((card.reasoning,))
    if card.ends:
        yield "a response ends with", _names(card.ends)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def _sampling(card: FamilyCard) -> Iterator[str]:
    yield "## Sampling values"
    rows = [
        (each.use, ", ".join(f"{key} {value:g}" for key, value in each.values.items()))
        for each in card.sampling
    ]
    yield table(("for", "recommended"), rows)
    values = next((dict(each.values) for each in card.sampling if each.values), None)
    yield (
        "Octavo uses the values in the checkpoint's generation_config.json, or in the header of a"
        f" GGUF file. Files without values get {DEFAULTS}, not those of this table. To set the"
        " recommended ones for all requests:"
    )
    yield f"    octavo serve {card.example} --override-generation-config '{json.dumps(values)}'"


def _memory(card: FamilyCard) -> Iterator[str]:
    yield "## Checkpoints and memory"
    sizes = [(each, estimate_memory(each, card.bits)) for each in card.checkpoints]
    has_kv = any(size.kv_bytes for _, size in sizes)
    head = ["checkpoint", "GGUF files", "parameters", "context", *map(_bits, card.bits)]
    if has_kv:
        head.append(f"KV cache for {KV_TOKENS:,} tokens, or a shorter context")
    has_gguf = any(each.gguf for each in card.checkpoints)
    if not has_gguf:
        head.remove("GGUF files")
    yield table(head, (_row(head, *size) for size in sizes))
    text = (
        "These are the sizes that `octavo plan` computes for the native backend. It also prints the"
        " memory for activations and for the process."
    )
    if has_gguf:
        text += " The weights of a GGUF file take about the size of the file."
    if has_kv:
        text += " `--kv-cache-dtype int8` halves the KV cache."
    yield text


def _bits(bits: Bits) -> str:
    option = QUANTIZATION[bits]
    return f"{bits} bits" if option is None else f"{bits} bits (`--quantization {option}`)"


def _row(head: list[str], each: CardCheckpoint, size: CheckpointMemory) -> Iterator[str]:
    yield _link(each.repository)
    if "GGUF files" in head:
        yield "" if each.gguf is None else _link(each.gguf)
    count = size.num_parameters / 1e6
    yield f"{count / 1e3:,.1f} B" if count >= 1e3 else f"{count:,.0f} M"
    yield f"{size.max_context_tokens:,}"
    yield from map(format_bytes, size.weight_bytes.values())
    if size.kv_bytes:
        yield format_bytes(size.kv_bytes)


def _link(repository: str) -> str:
    return f"[{repository}](https://huggingface.co/{repository})"
