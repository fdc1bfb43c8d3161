"""Adapters of tiny models, made and saved by PEFT, which is the oracle too: seeded, and wide enough
that logits differ clearly from the base model's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import build_programs
from octavo.program.passes.adapters import with_sites
from octavo.worker.lora.adapter_reader import Adapter, AdapterReader
from tests.support.tiny_models import TinyModel, double_precision, in_float64


def save_adapter(tiny: TinyModel, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Saves a seeded adapter of a tiny model by PEFT; `config` are fields of its LoraConfig."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
        model = peft.get_peft_model(copy.deepcopy(tiny.model), peft.LoraConfig(**options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if not value.requires_grad:
                    continue
                drawn = torch.randn(value.shape, generator=generator)
                is_magnitude = "magnitude" in name
                value.copy_(value * (1 + 0.3 * drawn) if is_magnitude else 0.2 * drawn)
        model.save_pretrained(folder)
    return folder


def peft_logits(tiny: TinyModel, adapter: Path, token_ids: Sequence[int]) -> NDArray[np.float64]:
    """Returns the logits `[T, V]` of PEFT's model, computed in float64."""
    base = in_float64(tiny.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=False)
    with double_precision():
        model = model.double()
        logits: NDArray[np.float64] = model(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits


def peft_scales(tiny: TinyModel, adapter: Path) -> dict[str, float]:
    """Returns the scale that PEFT gives each module, by the module's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(copy.deepcopy(tiny.model), str(adapter))
    return {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def read_adapter(tiny_path: Path, adapter: Path, **options: Any) -> Adapter:
    """Reads an adapter for the decoder of a model directory, as a worker does."""
    checkpoint = open_checkpoint(tiny_path)
    program = with_sites(build_programs(checkpoint.config)["decoder"])
    load = WeightReader(checkpoint).load
    reader = AdapterReader(
        program, lambda weight: load(weight).dequantize(), **{"max_rank": 64} | options
    )
    return reader.read(adapter)
