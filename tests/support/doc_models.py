"""Tiny seeded stand-ins for the models, keys and certificates that the guides' commands name."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trustme
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.doc_blocks import ROOT, blocks
from tests.support.free_ports import free_port
from tests.support.quantized_checkpoints import write_quantized
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_images import seeing_model
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

Placeholders = Mapping[str, str]
"""What replaces a pattern in a command."""

GUIDES = ROOT / "docs" / "guides"
WIDTH, NUM_LAYERS, RANK = 576, 30, 4
"""Sizes of SmolLM2-135M and of its adapters."""


def put(folder: Path, name: str, family: str = "llama", **config: Any) -> str:
    """Saves a tiny model with a tokenizer and short responses; returns its path for a command."""
    shutil.copytree(tiny_model(family, **config).path, folder / name, dirs_exist_ok=True)
    save_tiny_tokenizer(folder / name)
    defaults = json.dumps({"max_new_tokens": 16, "eos_token_id": 2})
    (folder / name / "generation_config.json").write_text(defaults)
    return f"./{name}"


def write_block(folder: Path, page: str, mark: str, name: str, placeholders: Placeholders) -> None:
    """Writes a marked code block of a guide to a file."""
    text = next(each.text for each in blocks(GUIDES / page) if each.mark == mark)
    for pattern, value in placeholders.items():
        text = text.replace(pattern, value)
    (folder / name).write_text(text)


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


def agent_model(folder: Path) -> Placeholders:
    path = put(folder, "agent", max_position_embeddings=32_768)
    qwen3 = f"serve {path} --served-model-name qwen3-8b"
    return {r"OWNER/REPO:Q4_K_M": path, r"serve qwen3-8b": qwen3}


def access(folder: Path) -> Placeholders:
    certificate = trustme.CA().issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(str(folder / "cert.pem"), append=True)
    write_block(folder, "access.md", "keys", "keys.yaml", {})
    return {r"/run/octavo/": ""}


def translator(folder: Path) -> Placeholders:
    return {r"\./t5-small": put(folder, "t5-small", "t5")}


def images(folder: Path) -> Placeholders:
    return {r"Qwen/Qwen2.5-VL-3B-Instruct": str(seeing_model("qwen2_5_vl").path)}


def quantized(folder: Path) -> Placeholders:
    """Saves a GPTQ checkpoint; the commands quantize a tiny model."""
    write_quantized(tiny_model("llama"), folder / "quantized-model", "gptq-4")
    save_tiny_tokenizer(folder / "quantized-model")
    path = put(folder, "tiny", **WIDTHS_OF_32["llama"])
    return {r"\bMODEL\b": path, r"--group 64": "--group 32"}


def four_kv_heads(folder: Path) -> Placeholders:
    config = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return {r"\bMODEL\b": put(folder, "tiny", **config)}


def several(folder: Path) -> Placeholders:
    put(folder, "checkpoints/mine")
    placeholders = {"gemma3-270m": put(folder, "gemma3", "gemma3_text")}
    write_block(folder, "several-models.md", "serve", "octavo.yaml", placeholders)
    return placeholders


def machines(folder: Path) -> Placeholders:
    """Machines of the guide are loopback addresses."""
    return {r"10\.0\.0\.(?=\d:|\d\b(?!/))": "127.0.0.", r"\bMODEL\b": put(folder, "tiny")}


def relu(folder: Path) -> Placeholders:
    path = put(folder, "relu", **WIDTHS_OF_32["llama"], hidden_act="relu")
    return {r"\bMODEL\b": path, r"--tokens \d+": "--tokens 512"}


def load(folder: Path) -> Placeholders:
    """Commands without --url test a tiny model, all of them with few requests."""
    path = put(folder, "tiny", max_position_embeddings=4096)
    return {
        r"octavo bench serve(?! --url)": f"octavo bench serve --model {path}",
        r"--num-requests \d+": "--num-requests 4",
    }


def new_model(folder: Path) -> Placeholders:
    """Saves a model of a type that only transformers has."""
    torch.manual_seed(0)
    config = transformers.CodeGenConfig(
        vocab_size=300, n_positions=512, n_embd=64, n_layer=2, n_head=4, rotary_dim=8
    )
    transformers.CodeGenForCausalLM(config).save_pretrained(folder / "codegen")
    save_tiny_tokenizer(folder / "codegen")
    return {r"^octavo (\w+) OWNER/NEW_MODEL": rf"env OCTAVO_CACHE={folder} octavo \1 ./codegen"}


def two_servers(folder: Path) -> Placeholders:
    """Sets the settings of KV events that the page describes."""
    events = {}
    for name, port in (("FIRST", free_port()), ("SECOND", free_port())):
        settings = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
        events[rf'"\${name}"'] = shlex.quote(json.dumps(settings))
    return {r"\bMODEL\b": put(folder, "tiny"), **events}
