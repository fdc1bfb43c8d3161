"""Options of activation sparsity, the neuron cache, KV selection and spill, and prefix weighing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class KvSpillOptions:
    """Options of the KV spill file, for keys and values that do not fit into memory."""

    kv_spill_dir: str | None = option(
        None,
        "Experimental",
        "Spill K and V to a file in this directory (InfiniGen)",
        details="Native only, with kv_selection: layers that select keys store K and V in this"
        " directory, and kv_cache_memory_bytes caches the most recently read. Results do not"
        " change.",
    )
    kv_spill_bytes: int | None = option(
        None,
        "Experimental",
        "Limit the file in kv_spill_dir, e.g. 20GiB",
        details="Limits the total number of tokens of all requests.",
        unit="bytes",
        low=1,
    )
    kv_spill_ahead: bool = option(
        False,
        "Experimental",
        "Prefetch the keys that the next layer is likely to read",
        details="Requires kv_spill_dir. Results do not change.",
    )


@dataclass(frozen=True, slots=True)
class PrefixWeighingOptions:
    """Options of scoring stored blocks by the attention of prompts to them."""

    prefix_cache_policy: Literal["lru", "importance"] = option(
        "lru",
        "Experimental",
        "Choose which stored blocks stay in memory",
        details="lru: least recently used blocks are evicted; importance (native, reference):"
        " blocks with the most attention from prompts stay, estimated with the keys of one layer"
        " (IMPRESS).",
    )
    prefix_cache_load: float = option(
        1.0,
        "Experimental",
        "Load this fraction of a stored prefix",
        details="With prefix_cache_policy importance: load the blocks with the most attention from"
        " the last tokens of a prompt. Below 1, results change.",
        low=0,
    )

    @property
    def weighs_prefixes(self) -> bool:
        return self.prefix_cache_policy == "importance"

    @property
    def loads_in_part(self) -> bool:
        """Whether prompts may skip parts of their stored prefix."""
        return self.prefix_sparsity > 0

    @property
    def prefix_sparsity(self) -> float:
        """Fraction of a stored prefix's blocks that a prompt does not load."""
        return 1.0 - self.prefix_cache_load if self.weighs_prefixes else 0.0


@dataclass(frozen=True, slots=True)
class NeuronOptions:
    """Options of feed-forward weights that are cached neuron by neuron."""

    neuron_cache_bytes: int | None = option(
        None,
        "Experimental",
        "Cache feed-forward weights per neuron (LLM in a Flash)",
        details="A part of weights_memory_bytes, used for active neurons. Requires ffn_sparsity"
        " and int8 weights.",
        unit="bytes",
        low=1,
    )
    neuron_window: int = option(
        0,
        "Experimental",
        "Evict a neuron not used for N tokens",
        details="Requires neuron_cache_bytes. 0: evict only when memory is full.",
        low=0,
    )
    weights_lookahead: int = option(
        0,
        "Experimental",
        "Prefetch neurons N layers ahead (ActiveFlow)",
        details="With neuron_cache_bytes and sparsity_predictor: read while the disk is idle."
        " Results do not change.",
        low=0,
    )
    hot_neurons: str | None = option(
        None,
        "Experimental",
        "Pin the most used neurons of a calibration (PowerInfer)",
        details="With neuron_cache_bytes: a file written by `octavo calibrate` for the same"
        " weights. The pinned neurons take half of the cache.",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class SparsityOptions:
    """Options of activation sparsity and key selection."""

    ffn_sparsity: str | None = option(
        None,
        "Experimental",
        "Skip feed-forward weights: exact, or gate:SHARE (CATS)",
        details="exact (native): skip weights whose input is zero after a ReLU, while one or two"
        " requests decode; results are bitwise equal. gate:SHARE, e.g. gate:0.3: treat this"
        " fraction of the gates of generated tokens as zero; requires a calibration and changes"
        " results.",
        metavar="MODE",
    )
    activation_sparsity: float = option(
        0.0,
        "Experimental",
        "Zero this fraction of activations (TEAL)",
        details="Zeroes the smallest inputs of the matmuls of each layer, up to 0.95, for"
        " generated tokens. Requires a calibration and changes results.",
        low=0,
    )
    activation_sparsity_plan: Literal["uniform", "greedy"] = option(
        "uniform",
        "Experimental",
        "Distribute activation_sparsity",
        metavar="PLAN",
        details="uniform: the same fraction for each matmul; greedy: the same average per layer,"
        " higher for matmuls that affect the output less.",
    )
    calibration: str | None = option(
        None,
        "Experimental",
        "Read sparsity thresholds from this file",
        details="A file written by `octavo calibrate` for the same weights.",
        metavar="FILE",
    )

    sparsity_predictor: str | None = option(
        None,
        "Experimental",
        "Compute only neurons chosen by this predictor (DejaVu)",
        details="A file written by `octavo calibrate --predictor-rank` for the same weights: for"
        " generated tokens, a low-rank predictor selects the neurons that contribute most, from"
        " the input of attention. native requires int8 weights. Changes results.",
        metavar="FILE",
    )
    predicted_share: float = option(
        0.5, "Experimental", "Compute this fraction of the neurons", low=0
    )

    kv_selection: Literal["speculated"] | None = option(
        None,
        "Experimental",
        "Read only the most attended blocks of keys (InfiniGen)",
        details="Supported by native and reference, for generated tokens in all layers except the"
        " first two; the"
        " previous layer selects the blocks. Changes results.",
    )
    kv_budget: float = option(0.3, "Experimental", "Read this fraction of the key blocks", low=0)

    @property
    def gate_sparsity(self) -> float:
        """Fraction of gates to zero; NaN if the option is malformed."""
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
        """Fraction of a feed-forward layer's neurons that the predictor skips."""
        return 0.0 if self.sparsity_predictor is None else 1.0 - self.predicted_share

    @property
    def key_sparsity(self) -> float:
        """Fraction of key blocks that generated tokens do not read."""
        return 0.0 if self.kv_selection is None else 1.0 - self.kv_budget
