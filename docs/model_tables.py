"""The table of families in the guide to models, which the registry makes."""

from __future__ import annotations

from pathlib import Path

from tables import table

from octavo.models.registry import Kind
from octavo.wiring.survey import FamilyRow, families

GUIDE = Path(__file__).parent / "guides" / "models.md"
BEGIN, END = "<!-- The families, by docs/generate.py -->\n", "<!-- End of the families -->\n"
KINDS: dict[Kind, str] = {
    "decoder": "decoders",
    "experts": "decoders with routed experts",
    "encoder": "encoders",
    "encoder-decoder": "encoders and decoders",
}


def guide() -> str:
    """Returns the guide with the table that the registry makes now."""
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{_table()}\n{END}{after}"


def _table() -> str:
    rows = [_row(row) for kind in KINDS for row in families() if row.family.kind == kind]
    return table(("`model_type`", "models", "kind", "native", "GGUF"), rows)


def _row(row: FamilyRow) -> tuple[str, ...]:
    native = "yes" if row.family.native else "refused by name"
    kind = KINDS[row.family.kind]
    return f"`{row.model_type}`", row.family.models, kind, native, ", ".join(row.architectures)
