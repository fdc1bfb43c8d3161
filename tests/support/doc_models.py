"""Tiny seeded stand-ins for the models that the guides' commands name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.tiny_images import seeing_model
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

Placeholders = Mapping[str, str]
"""What replaces a pattern in a command."""

WIDTH, NUM_LAYERS, RANK = 576, 30, 4
"""Sizes of SmolLM2-135M and of its adapters."""


def adapters(folder: Path) -> Placeholders:
    """Saves two adapters of SmolLM2 that change its logits little."""
    for seed, name in enumerate(("poet", "law")):
        generator = np.random.default_rng(seed)
        (folder / name).mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for layer in range(NUM_LAYERS):
            module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            tensors[f"{module}.lora_A.weight"] = _draw(generator, (RANK, WIDTH))
            tensors[f"{module}.lora_B.weight"] = _draw(generator, (WIDTH, RANK))
        save_file(tensors, folder / name / "adapter_model.safetensors")
    return {}


def _draw(generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    return (0.01 * generator.standard_normal(shape)).astype(np.float32)


def translator(folder: Path) -> Placeholders:
    shutil.copytree(tiny_model("t5").path, folder / "t5-small")
    save_tiny_tokenizer(folder / "t5-small")
    return {}


def experts(folder: Path) -> Placeholders:
    shutil.copytree(tiny_model("qwen3_moe").path, folder / "experts")
    save_tiny_tokenizer(folder / "experts")
    return {r"\bMODEL(?= --weights-memory-bytes)": "./experts"}


def images(folder: Path) -> Placeholders:
    return {r"Qwen/Qwen2.5-VL-3B-Instruct": str(seeing_model("qwen2_5_vl").path)}
