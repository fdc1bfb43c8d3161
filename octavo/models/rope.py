"""RoPE tables of a config: types default, linear, dynamic, ntk, llama3, yarn, longrope and
proportional.

Reads old keys (`rope_theta` and a `rope_scaling` dict with `type`) and new ones (`rope_parameters`
with `rope_type`). Sources: Su et al. 2021; linear: position interpolation, Chen et al. 2023;
llama3: Meta's Llama 3.1 release; yarn: Peng et al. 2023, with the attention factor as in
transformers; longrope: Ding et al. 2024; proportional: Gemma 4 in transformers; ntk: the fixed
scaling of Alibaba-NLP's GTE (kexue.fm/archives/9706).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import ROPE, refuse_unread
from octavo.models.hf_config import HfConfig
from octavo.program.ops import LongAngles, RopeTable

DEFAULT_THETA = 10_000.0


class RopeParameters:
    """One set of RoPE parameters, from old or new keys."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        theta: float,
        max_positions: int,
        original_positions: int | None = None,
        partial: float | None = None,
    ) -> None:
        """`partial` is the family's default fraction of rotary columns; None: all columns must
        rotate.
        """
        nested = [name for name, value in given.items() if isinstance(value, dict)]
        if nested:
            raise UnsupportedModel(
                f"config.json: rope_parameters by layer type ({', '.join(nested)}) are not"
                " supported for this family"
            )
        refuse_unread({"model_type": "rope_parameters", **given}, ROPE)
        self._given = given
        named = given.get("rope_type") or given.get("type")
        self.kind = str(named or "default")
        if named is None and given.get("factor") not in (None, 1):
            raise UnsupportedModel(
                f"config.json: the rope parameters have the factor {given['factor']!r} and no"
                f" rope_type",
                hint='add "rope_type": "linear", or the rope type of this factor',
            )
        self.theta = self.positive("rope_theta", theta)
        self.max_positions = max_positions
        # Top-level keys of the config take precedence over the parameters, as in transformers.
        self.original_positions = original_positions or self.positive(
            "original_max_position_embeddings", max_positions
        )
        if given.get("mrope_section") is not None:
            raise UnsupportedModel("config.json: mrope_section is not supported for this family")

        self.share = self.number("partial_rotary_factor", partial or 1.0)
        partial = self.share if self.kind == "proportional" else partial
        if not 0 < self.share <= 1 or (partial is None and self.share != 1):
            raise UnsupportedModel(
                f"config.json: partial_rotary_factor is {self.share}, expected "
                + ("1 for this family" if partial is None else "a number above 0, at most 1")
            )

    def number(self, name: str, default: float | None = None) -> float:
        value = self._given.get(name)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UnsupportedModel(
                f"config.json: rope type {self.kind} needs the number {name}, got {value!r}"
            )
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise UnsupportedModel(f"config.json: {name} is {value!r}, expected a number above 0")
        return value

    def optional(self, name: str) -> float | None:
        return None if self._given.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._given.get(name)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(item, int | float) and item for item in value)
        ):
            raise UnsupportedModel(
                f"config.json: rope type {self.kind} needs {name}, a list of {count} numbers"
            )
        return [float(item) for item in value]

    def flag(self, name: str, default: bool) -> bool:
        value = self._given.get(name)
        return default if value is None else bool(value)

    def table(self, head_dim: int) -> RopeTable:
        """Returns the table for heads of `head_dim` columns."""
        rotary_dim = head_dim if self.kind == "proportional" else int(head_dim * self.share)
        # An odd number rotates one more column, as in transformers.
        if rotary_dim < 2 or rotary_dim + rotary_dim % 2 > head_dim:
            raise UnsupportedModel(
                f"config.json: {rotary_dim} rotary dims of head size {head_dim}, expected an even"
                f" number"
            )
        if self.kind not in _MAKERS:
            raise UnsupportedModel(
                f"config.json: rope type {self.kind!r} is not supported, known are"
                f" {', '.join(_MAKERS)}"
            )
        return _MAKERS[self.kind](self, rotary_dim)


def rope_parameters(
    config: HfConfig, *, default_theta: float = DEFAULT_THETA, partial: float | None = None
) -> RopeParameters:
    """Reads the parameters of a model with one set.

    If both spellings are present, `rope_scaling` wins, as in transformers. `partial` is passed to
    RopeParameters.
    """
    scaling, parameters = config.table("rope_scaling"), config.table("rope_parameters")
    given = dict(scaling or parameters)
    if config.values.get("partial_rotary_factor") is not None:
        given.setdefault("partial_rotary_factor", config.values["partial_rotary_factor"])
    return RopeParameters(
        given,
        theta=config.number("rope_theta", default_theta),
        max_positions=config.integer("max_position_embeddings", low=1),
        original_positions=config.optional_integer("original_max_position_embeddings"),
        partial=partial,
    )


def tables_by_layer_type(
    config: HfConfig,
    head_dim: int,
    *,
    sliding_theta: float,
    full_theta: float,
    scales_both: bool = False,
    full_head_dim: int | None = None,
) -> tuple[RopeTable, RopeTable]:
    """Returns the tables of sliding and full layers.

    New configs have a set of parameters for each; old ones scale only the full layers, or all with
    `scales_both`. The bases are defaults. `full_head_dim` is the full layers' head size, if it
    differs.
    """
    by_type, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    others = sorted(by_type.keys() - {"sliding_attention", "full_attention"})
    if others:
        raise UnsupportedModel(
            f"config.json: rope_parameters has {', '.join(others)} for all layers, expected one"
            f" set for sliding_attention and one for full_attention"
        )
    sliding = {**(by_type.get("sliding_attention") or {}), **(scaling if scales_both else {})}
    full = {**(by_type.get("full_attention") or {}), **scaling}
    positions = config.integer("max_position_embeddings", low=1)
    return (
        RopeParameters(sliding, theta=sliding_theta, max_positions=positions).table(head_dim),
        RopeParameters(full, theta=full_theta, max_positions=positions).table(
            full_head_dim or head_dim
        ),
    )


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's attention temperature, 0.1 * weight * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _plain(p: RopeParameters, dim: int) -> list[float]:
    return [p.theta ** -(i / dim) for i in range(0, dim, 2)]


def _default(p: RopeParameters, dim: int) -> RopeTable:
    return RopeTable(tuple(_plain(p, dim)))


def _linear(p: RopeParameters, dim: int) -> RopeTable:
    factor = p.positive("factor")
    return RopeTable(tuple(f / factor for f in _plain(p, dim)))


def _dynamic(p: RopeParameters, dim: int) -> RopeTable:
    """Returns unscaled frequencies: scaling would only apply beyond max_position_embeddings, which
    is rejected.
    """
    p.positive("factor")
    return _default(p, dim)


def _ntk(p: RopeParameters, dim: int) -> RopeTable:
    """Multiplies the base by `factor`, and divides all frequencies so that the last one is divided
    by `factor`.
    """
    factor = p.positive("factor")
    scale = factor ** (2 / dim)
    return RopeTable(tuple((p.theta * factor) ** -(i / dim) / scale for i in range(0, dim, 2)))


def _llama3(p: RopeParameters, dim: int) -> RopeTable:
    """Scales long wavelengths by `factor`, keeps short ones, and interpolates in between."""
    factor = p.positive("factor")
    low = p.number("low_freq_factor")
    high = p.number("high_freq_factor")

    def stretched(frequency: float) -> float:
        turns = p.original_positions * frequency / (2 * math.pi)
        if turns > high:
            return frequency
        if turns < low:
            return frequency / factor
        kept = (turns - low) / (high - low)
        return (1 - kept) * frequency / factor + kept * frequency

    return RopeTable(tuple(stretched(f) for f in _plain(p, dim)))


def _yarn(p: RopeParameters, dim: int) -> RopeTable:
    """Interpolates frequencies below `low` and keeps those above `high`: the columns that make
    beta_fast and beta_slow rotations over the original context.
    """
    factor = p.positive("factor")

    def column(turns: float) -> float:
        return (
            dim * math.log(p.original_positions / (turns * 2 * math.pi)) / (2 * math.log(p.theta))
        )

    low, high = column(p.optional("beta_fast") or 32.0), column(p.optional("beta_slow") or 1.0)
    if p.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001

    def blended(i: int, frequency: float) -> float:
        # An odd last column is blended like the last pair, as in transformers.
        pair = min(i, dim // 2 - 1)
        ramp = min(max((pair - low) / width, 0.0), 1.0)
        return frequency / factor * ramp + frequency * (1 - ramp)

    return RopeTable(
        tuple(blended(i, f) for i, f in enumerate(_plain(p, dim))),
        _yarn_attention_factor(p, factor),
    )


def _yarn_attention_factor(p: RopeParameters, factor: float) -> float:
    """Returns the config's attention factor, else the quotient of mscale and mscale_all_dim
    (DeepSeek), else the paper's value.
    """
    given = p.optional("attention_factor")
    if given is not None:
        return given
    mscale, all_dim = p.optional("mscale"), p.optional("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def _longrope(p: RopeParameters, dim: int) -> RopeTable:
    """Divides each frequency by its own factor: short ones up to the original context, long ones
    for longer requests.
    """
    short, long = p.numbers("short_factor", dim // 2), p.numbers("long_factor", dim // 2)
    given = p.optional("attention_factor")
    factor = p.positive("factor", p.max_positions / p.original_positions)
    attention = (
        1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(p.original_positions))
    )
    mscale = attention if given is None else given
    plain = _plain(p, dim)
    short_angles, long_angles = (
        tuple(f / by for f, by in zip(plain, factors, strict=True)) for factors in (short, long)
    )
    if short == long:
        return RopeTable(short_angles, mscale)
    return RopeTable(
        short_angles, mscale, long=LongAngles(int(p.original_positions), long_angles, mscale)
    )


def _proportional(p: RopeParameters, dim: int) -> RopeTable:
    """Rotates the first fraction of a head's pairs, with frequencies as if all rotated; the other
    pairs have frequency 0.
    """
    count, factor = int(p.share * dim // 2), p.positive("factor", 1.0)
    rotated = [f / factor for f in _plain(p, dim)[:count]]
    return RopeTable((*rotated, *[0.0] * (dim // 2 - count)))


_MAKERS: dict[str, Callable[[RopeParameters, int], RopeTable]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
