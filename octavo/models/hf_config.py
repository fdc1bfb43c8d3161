"""Reads config.json: typed access with clear errors, and basic properties of a model.

Old and new spellings are equivalent (`torch_dtype` and `dtype`, GPT-2's `n_embd`). Unsupported
settings raise errors. Source of names and defaults: the configuration classes of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import RecordedKeys
from octavo.program.ops import Activation

ValueT = TypeVar("ValueT")

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

DEFAULT_CONTEXT_TOKENS = 512
"""Context of models with relative positions only and no length in the config (T5 was trained with
512)."""

RECURRENT_CONTEXT_TOKENS = 1 << 17
"""Context of models with recurrent layers only, in tokens. The only limit is the number of token
ids that the engine keeps per request.
"""

# Far beyond any model; without bounds, a damaged file could build Programs for hours.
MAX_WHOLE = (1 << 31) - 1
"""Upper bound of any integer."""
MAX_SIZE = 1 << 20
"""Upper bound of widths and numbers of heads."""
MAX_COUNT = 10_000
"""Upper bound of numbers of layers and experts."""


class HfConfig:
    """config.json with types.

    A getter without a default requires the key; `null` counts as missing.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = RecordedKeys(values)

    @property
    def model_type(self) -> str:
        return self.text("model_type")

    @property
    def architecture(self) -> str:
        """The transformers class that saved the model; "" if missing."""
        given = self._get("architectures", [""])
        if not isinstance(given, list) or not given or not isinstance(given[0], str):
            raise self._wrong("architectures", given, "a list of names")
        return given[0]

    def renamed(self, **names: str) -> HfConfig:
        """Returns the config with the family's own key names mapped to the usual ones, e.g.
        `renamed(hidden_size="n_embd")`; a usual name that is present takes precedence.
        """
        own = {usual: self.values[name] for usual, name in names.items() if name in self.values}
        given = {k: v for k, v in self.values.items() if v is not None or k not in own}
        return HfConfig(RecordedKeys({**own, **given}, self.values.asked))

    def with_values(self, **values: Any) -> HfConfig:
        """Returns the config with some values replaced."""
        return HfConfig(RecordedKeys({**self.values, **values}, self.values.asked))

    def get_if_missing(self, name: str, default: ValueT) -> ValueT | None:
        """Returns `default` if the key is missing, and None if it is present: for some families
        null differs from a missing key.
        """
        return None if name in self.values else default

    def without_effect(self, *names: str) -> None:
        """Marks keys as known but without effect for this config."""
        self.values.asked.update(names)

    def integer(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = MAX_WHOLE
    ) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high:,}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Reads a width or a number of heads."""
        return self.integer(name, default, low=1, high=MAX_SIZE)

    def count(self, name: str, default: int | None = None) -> int:
        """Reads a number of layers or experts."""
        return self.integer(name, default, low=1, high=MAX_COUNT)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._wrong(name, value, "a number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self._wrong(name, value, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def ties_head(self, default: bool) -> bool:
        """Returns whether the output layer is the token embedding.

        The checkpoint sets `has_own_head` if the files contain a different output layer.
        """
        has_own = self.flag("has_own_head", False)
        return self.flag("tie_word_embeddings", default) and not has_own

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Reads an object; {} if missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Reads one integer or a list, such as token ids; () if missing."""
        value = self._get(name, [])
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise self._wrong(name, value, "an integer or a list of them")
        return numbers

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def optional_positive(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.positive(name)

    def cap(self, name: str, default: float) -> float | None:
        """Reads a soft cap; the default applies if the key is missing, null means none."""
        given = self.optional_positive(name)
        return self.get_if_missing(name, default) if given is None else given

    def activation(self, name: str, default: str) -> Activation:
        """Reads an activation by its transformers name."""
        value = self.text(name, default)
        if value not in ACTIVATIONS:
            raise UnsupportedModel(
                f"config.json: {name} is {value!r}, supported: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """Raises UnsupportedModel unless an option has one of the allowed values; a missing key is
        allowed.
        """
        value = self.values.get(name)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed) or "null"
            raise UnsupportedModel(
                f"config.json: {name} is {value!r}, supported: {shown} for {self.model_type}"
            )

    def window(self, default: int) -> int | None:
        """Reads the sliding window; the default applies if the key is missing, null means none."""
        return self.optional_integer("sliding_window") or self.get_if_missing(
            "sliding_window", default
        )

    def layer_windows(
        self, num_layers: int, window: int | None, is_sliding: Callable[[int], bool]
    ) -> tuple[int | None, ...]:
        """Returns each layer's window (None: full attention), from `layer_types` or the family's
        rule.
        """
        types = self.values.get("layer_types")
        if types is None:
            types = [
                "sliding_attention" if window and is_sliding(i) else "full_attention"
                for i in range(num_layers)
            ]
        if not isinstance(types, list) or len(types) != num_layers:
            got = f"{len(types)} layers" if isinstance(types, list) else types
            raise self._wrong("layer_types", got, f"a list of {num_layers}, from num_hidden_layers")
        for name in types:
            if name not in ("full_attention", "sliding_attention"):
                raise self._wrong("layer_types", name, "full_attention or sliding_attention")
        if "sliding_attention" in types and not window:
            raise self._wrong(
                "sliding_window",
                self.values.get("sliding_window"),
                "the window of the sliding layers",
            )
        return tuple(window if name == "sliding_attention" else None for name in types)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise UnsupportedModel(
                f"config.json: {name} is missing"
                + ("" if name == "model_type" else f", {self.values.get('model_type')} needs it"),
                hint="the file is incomplete, or not a Hugging Face config of this family",
            )
        return default

    def _wrong(self, name: str, value: Any, allowed: str) -> UnsupportedModel:
        return UnsupportedModel(f"config.json: {name} is {value!r}, expected {allowed}")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Basic properties of a model that the engine needs."""

    model_type: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """Compute dtype that the model is intended for: float32, bfloat16 or float16."""
    is_encoder_decoder: bool
    decoder_prompt: tuple[int, ...] = ()
    """Initial tokens of an encoder-decoder model's decoder: its start token and a forced first
    token."""
    max_encoder_tokens: int = 0
    """Longest encoder input; 0 without an encoder."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that generation_config.json excludes from sampling."""


def model_info(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelInfo:
    """Returns a model's basic properties.

    Token ids come from generation_config.json if present, as in transformers' generate; end tokens
    from both files.
    """
    hf = HfConfig(config)
    ids = {
        **config,
        **{name: value for name, value in (generation_config or {}).items() if value is not None},
    }
    has_encoder = hf.flag("is_encoder_decoder", False)
    return ModelInfo(
        model_type=hf.model_type,
        max_context_tokens=exact_context(hf),
        vocab_size=_first_integer(hf, ("padded_vocab_size", "vocab_size"), None),
        eos_token_ids=tuple(
            dict.fromkeys([*HfConfig(ids).integers("eos_token_id"), *hf.integers("eos_token_id")])
        ),
        bos_token_id=ids.get("bos_token_id"),
        dtype=_dtype(config),
        is_encoder_decoder=has_encoder,
        decoder_prompt=_decoder_prompt(HfConfig(ids)) if has_encoder else (),
        max_encoder_tokens=_encoder_context(hf) if has_encoder else 0,
        banned_token_ids=_banned(HfConfig(ids)),
    )


def _decoder_prompt(ids: HfConfig) -> tuple[int, ...]:
    """Returns the decoder's initial tokens, as in transformers' `generate`."""
    start = ids.integers("decoder_start_token_id") or ids.integers("bos_token_id")
    return start + ids.integers("forced_bos_token_id")


def _encoder_context(config: HfConfig) -> int:
    return _first_integer(config, ("max_source_positions",), exact_context(config))


def _banned(ids: HfConfig) -> tuple[int, ...]:
    """Returns the single tokens that the config bans."""
    words = ids.values.get("bad_words_ids") or []
    alone = [word[0] for word in words if isinstance(word, list) and len(word) == 1]
    suppressed = [token for token in ids.integers("suppress_tokens") if token >= 0]
    return tuple(dict.fromkeys([*alone, *suppressed]))


def exact_context(config: HfConfig) -> int:
    """Returns the longest context that the model supports exactly, in tokens."""
    names = (
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        *("max_target_positions", "model_max_length"),
    )
    recurs = config.values.get("model_type") in ("mamba", "mamba2")
    unnamed = RECURRENT_CONTEXT_TOKENS if recurs else DEFAULT_CONTEXT_TOKENS
    return _first_integer(config, names, unnamed)


def _first_integer(config: HfConfig, names: tuple[str, ...], default: int | None) -> int:
    """Reads the first of several keys that the config has."""
    given = [name for name in names if config.values.get(name) is not None]
    return config.integer(given[0] if given else names[-1], default, low=1)


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name == "float64":
        return "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(
            f"config.json: dtype is {name!r}, supported: float32, bfloat16 and float16"
        )
    return name
