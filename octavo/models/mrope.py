"""M-RoPE tables: each frequency of a head is turned by time, row or column.

Source: Wang et al. 2024 (Qwen2-VL: one run of frequencies per axis); Bai et al. 2025 (Qwen3-VL:
interleaved axes).
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.rope import rope_parameters
from octavo.program.ops import RopeTable


def mrope_table(
    config: HfConfig,
    head_dim: int,
    *,
    sections: Sequence[int],
    theta: float,
    interleaved: bool = False,
    partial: float | None = None,
) -> RopeTable:
    """Returns the RoPE table with axes from mrope_section; `sections` and `theta` are the family's
    defaults, `partial` is passed to RopeParameters.

    With `interleaved`, frequencies alternate between time, row and column up to three times an
    axis's section; the others turn by time.
    """
    given = config.table("rope_scaling") or config.table("rope_parameters")
    named = given.get("mrope_section") or list(sections)
    plain = {name: value for name, value in given.items() if not name.startswith("mrope_")}
    for word in ("type", "rope_type"):
        if plain.get(word) == "mrope":  # the name in transformers 4
            plain[word] = "default"
    ropes = rope_parameters(
        config.with_values(rope_scaling={}, rope_parameters=plain),
        default_theta=theta,
        partial=partial,
    )
    table = ropes.table(head_dim)
    if len(named) != 3 or sum(named) != len(table.inv_freq):
        raise UnsupportedModel(
            f"config.json: mrope_section is {named!r}, expected three numbers that add up to"
            f" {len(table.inv_freq)}, half of the rotary dims"
        )
    if table.long is not None:
        raise UnsupportedModel("config.json: mrope_section with longrope is not supported")
    axes = tuple(axis for axis, count in enumerate(named) for _ in range(count))
    if interleaved:
        axes = tuple(i % 3 if i < 3 * named[i % 3] else 0 for i in range(len(axes)))
    return RopeTable(table.inv_freq, table.mscale, axes)
