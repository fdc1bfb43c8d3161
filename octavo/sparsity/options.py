"""Options of activation sparsity, the neuron cache, KV selection and spill, and prefix weighing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class KvSpillOptions:
    """Options of keys and values that are not all in memory."""

    kv_spill_dir: str | None = option(
        None,
        "Experimental",
        "Keep K and V of selecting layers in a file here (InfiniGen)",
        details="Native, with kv_selection: layers that choose which keys they read have theirs in"
        " this directory, and kv_cache_memory_bytes holds those read last. No result changes.",
    )
    kv_spill_bytes: int | None = option(
        None,
        "Experimental",
        "Limit the file in kv_spill_dir, e.g. 20GiB",
        details="It bounds the tokens of all requests.",
        unit="bytes",
        low=1,
    )
    kv_spill_ahead: bool = option(
        False,
        "Experimental",
        "Prefetch the keys that the next layer is likely to read",
        details="With kv_spill_dir; no result depends on it.",
    )


@dataclass(frozen=True, slots=True)
class PrefixWeighingOptions:
    """Options of stored blocks that are weighed by the attention that prompts pay to them."""

    prefix_cache_policy: Literal["lru", "importance"] = option(
        "lru",
        "Experimental",
        "Choose stored blocks kept in memory",
        details="lru: those used last; importance (native, reference): those that get most"
        " attention from prompts, by one layer's keys, which are kept apart (IMPRESS).",
    )
    prefix_cache_load: float = option(
        1.0,
        "Experimental",
        "Load this fraction of a stored prefix",
        details="With prefix_cache_policy importance: loads the blocks that get most attention from"
        " a prompt's last tokens. Below 1 results change.",
        low=0,
    )

    @property
    def weighs_prefixes(self) -> bool:
        return self.prefix_cache_policy == "importance"

    @property
    def loads_in_part(self) -> bool:
        """Whether prompts may skip a part of their stored prefix."""
        return self.prefix_sparsity > 0

    @property
    def prefix_sparsity(self) -> float:
        """Share of a stored prefix's blocks that a prompt does not load."""
        return 1.0 - self.prefix_cache_load if self.weighs_prefixes else 0.0


@dataclass(frozen=True, slots=True)
class NeuronOptions:
    """Options of feed-forward weights that are cached neuron by neuron."""

    neuron_cache_bytes: int | None = option(
        None,
        "Experimental",
        "Cache feed-forward weights neuron by neuron (LLM in a Flash)",
        details="A part of weights_memory_bytes for the neurons that tokens use. Needs ffn_sparsity"
        " and int8 weights.",
        unit="bytes",
        low=1,
    )
    neuron_window: int = option(
        0,
        "Experimental",
        "Drop a neuron that N tokens have not used",
        details="With neuron_cache_bytes. 0: keep it while there is room.",
        low=0,
    )
    weights_lookahead: int = option(
        0,
        "Experimental",
        "Prefetch neurons N layers ahead (ActiveFlow)",
        details="With neuron_cache_bytes and sparsity_predictor: reads while the disk is idle. No"
        " result depends on it.",
        low=0,
    )
    hot_neurons: str | None = option(
        None,
        "Experimental",
        "Pin the neurons this calibration used most (PowerInfer)",
        details="With neuron_cache_bytes: a file of `octavo calibrate` for the same weights. The"
        " neurons take half of that memory.",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class SparsityOptions:
    """Options of work that need not be done."""

    ffn_sparsity: str | None = option(
        None,
        "Experimental",
        "Skip feed-forward weights: exact, or gate:SHARE (CATS)",
        details="exact (native): weights whose input is zero after a ReLU are not read while one or"
        " two requests decode; the results are the same bits. gate:SHARE, e.g. gate:0.3: that share"
        " of the gates of generated tokens counts as zero; needs a calibration, changes results.",
        metavar="MODE",
    )
    activation_sparsity: float = option(
        0.0,
        "Experimental",
        "Treat this share of activations as 0 (TEAL)",
        details="The smallest inputs of each layer's products, up to 0.95, in generated tokens;"
        " needs a calibration and changes results.",
        low=0,
    )
    activation_sparsity_plan: Literal["uniform", "greedy"] = option(
        "uniform",
        "Experimental",
        "Spread activation_sparsity over layers",
        metavar="PLAN",
        details="uniform: each product has that share; greedy: each layer has it on average, more"
        " where its output changes less.",
    )
    calibration: str | None = option(
        None,
        "Experimental",
        "Read sparsity thresholds from this file",
        details="A file of `octavo calibrate` for the same weights.",
        metavar="FILE",
    )

    sparsity_predictor: str | None = option(
        None,
        "Experimental",
        "Compute only neurons chosen by this predictor (DejaVu)",
        details="A file of `octavo calibrate --predictor-rank` for the same weights: a low-rank"
        " predictor chooses, from the attention's input, the neurons that add most to the layer's"
        " output, for generated tokens. native needs int8 weights. Changes results.",
        metavar="FILE",
    )
    predicted_share: float = option(0.5, "Experimental", "Compute this share of the neurons", low=0)

    kv_selection: Literal["speculated"] | None = option(
        None,
        "Experimental",
        "Read only the most attended blocks of keys (InfiniGen)",
        details="native, reference: for generated tokens, in all layers but the first two; the"
        " blocks are chosen by the layer before. Changes results.",
    )
    kv_budget: float = option(0.3, "Experimental", "Read this share of the key blocks", low=0)

    @property
    def gate_sparsity(self) -> float:
        """Share of gates to zero; NaN if the option is malformed."""
        if self.ffn_sparsity is None or not self.ffn_sparsity.startswith("gate:"):
            return 0.0
        try:
            return float(self.ffn_sparsity.removeprefix("gate:"))
        except ValueError:
            return math.nan

    @property
    def is_approximate(self) -> bool:
        """Whether generated tokens are computed differently from prompt tokens."""
        return bool(
            self.activation_sparsity
            or self.gate_sparsity
            or self.sparsity_predictor
            or self.kv_selection
        )

    def numbers(self) -> list[Any]:
        """Returns the settings that change results of generated tokens, except the calibration."""
        thresholds = [self.activation_sparsity, self.activation_sparsity_plan, self.gate_sparsity]
        predicted = [] if self.sparsity_predictor is None else ["predicted", self.predicted_share]
        selected = [] if self.kv_selection is None else [self.kv_selection, self.kv_budget]
        return thresholds + predicted + selected

    @property
    def neuron_sparsity(self) -> float:
        """Share of a feed-forward layer's neurons that the predictor skips."""
        return 0.0 if self.sparsity_predictor is None else 1.0 - self.predicted_share

    @property
    def key_sparsity(self) -> float:
        """Share of key blocks that generated tokens do not read."""
        return 0.0 if self.kv_selection is None else 1.0 - self.kv_budget
