"""llama.cpp under LoRA adapters that each request names, through its own `llama-server`; and the
GGUF files that it takes, of a random qwen2 in Q8_0 and of adapters that PEFT's files have.

The server computes requests of one step together only where their adapters are the same; others
wait until those that were first have ended.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from engines.servers import free_port, started
from formats import BY_NAME, blocks_of
from moe_2b import finish, write_vocabulary
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""GGUF's names of the linears in a layer."""
SLOT_TOKENS = 256
"""Context of each stream; llama.cpp rounds up to it."""
TYPE = "Q8_0"


@dataclass(frozen=True)
class Streams:
    """Prompts of token ids, and how many tokens each is answered with."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int

    def rate(self, url: str, adapters: Sequence[int | None]) -> float:
        """Returns the tokens/s of all streams behind their first tokens; `adapters` are the ids of
        each stream's, in the order in which the server was given them.
        """
        spent_s = self.seconds(url, adapters, self.num_tokens) - self.seconds(url, adapters, 1)
        return len(self.prompts) * (self.num_tokens - 1) / spent_s

    def seconds(self, url: str, adapters: Sequence[int | None], num_tokens: int) -> float:
        """Returns the seconds that all streams take at once, each answered with `num_tokens`."""

        def one(prompt: Sequence[int], adapter: int | None) -> int:
            body: dict[str, Any] = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0}
            body |= {"ignore_eos": True, "cache_prompt": False}
            if adapter is not None:
                body["lora"] = [{"id": adapter, "scale": 1.0}]
            return int(_answer(url, body)["tokens_predicted"])

        began = time.perf_counter()
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            counts = list(pool.map(one, self.prompts, adapters))
        spent_s = time.perf_counter() - began
        if counts != [num_tokens] * len(self.prompts):
            raise SystemExit(f"llama-server made {counts} tokens, asked were {num_tokens} each")
        return spent_s


def serving(
    binary: str, model: Path, num_streams: int, adapters: Sequence[Path] = ()
) -> AbstractContextManager[str]:
    """Runs llama-server with adapters loaded and none applied; gives its URL."""
    port = free_port()
    command = [binary, "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(num_streams), "-c", str(num_streams * SLOT_TOKENS)]
    command += ["-t", str(len(os.sched_getaffinity(0))), "--cache-ram", "0"]
    if adapters:
        command += ["--lora", ",".join(map(str, adapters)), "--lora-init-without-apply"]
    return started(command, port)


def _answer(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


# -- files -----------------------------------------------------------------------------------------


def write_adapter(folder: Path, target: Path, architecture: str, alpha: float) -> Path:
    """Writes a PEFT adapter in bfloat16 as llama.cpp reads it.

    A llama's rows of queries and keys lie in another order in GGUF. They are left as they are here,
    for the numbers are random.
    """
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, numbers in load_file(folder / "adapter_model.safetensors").items():
        layer, rest = name.removeprefix("base_model.model.model.layers.").split(".", 1)
        module, part, _ = rest.rsplit(".", 2)
        tensor = f"blk.{layer}.{NAMES[module]}.weight.{part.lower()}"
        data = np.ascontiguousarray(numbers).view(np.uint8)
        writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(writer)
    return target


def write_qwen2(target: Path, config: dict[str, Any]) -> Path:
    """Writes a random model of a qwen2 config, with tied embeddings."""
    drawn = blocks_of(BY_NAME[TYPE], np.random.default_rng(0))
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    write_vocabulary(writer, config["vocab_size"])
    for name, (rows, inputs) in _matrices(config).items():
        num_blocks = rows * inputs // BY_NAME[TYPE].block_size
        blocks = np.resize(drawn, (num_blocks, BY_NAME[TYPE].block_bytes)).reshape(rows, -1)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[TYPE])
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            writer.add_tensor(name.replace("weight", "bias"), np.zeros(rows, np.float32))
    norms = [
        f"blk.{layer}.{part}_norm.weight"
        for layer in range(config["num_hidden_layers"])
        for part in ("attn", "ffn")
    ]
    for name in ("output_norm.weight", *norms):
        writer.add_tensor(name, np.ones(config["hidden_size"], np.float32))
    finish(writer)
    return target


def _matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the shapes of all matrices by name."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kept = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kept, hidden),
        "attn_v": (kept, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (width, hidden),
        "ffn_up": (width, hidden),
        "ffn_down": (hidden, width),
    }
    found = {"token_embd.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return found


def architecture_of(model: Path) -> str:
    """Returns the architecture that a GGUF file names."""
    return str(gguf.GGUFReader(model).fields["general.architecture"].contents())
