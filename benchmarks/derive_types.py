"""Derives a tiny model of every causal type of transformers that Octavo has no family for.

    python benchmarks/derive_types.py [TYPE...] [--covered] [--limit 120] [--jobs 2]

Prints one line per type, then counts: exact (the Program of the whole tiny model gives
transformers' logits), rejected (with the reason), not a decoder, no tiny config, or wrong (derived
with other logits; must be 0). Configs are the defaults of transformers' config classes with small
sizes. With `--covered` the types are those of Octavo's own families, whose configs are in
tests/support: run it with PYTHONPATH=. from the repository's root.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import time
from collections import Counter
from itertools import islice
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.api.errors import UnsupportedModel
from octavo.derive.derive import derive
from octavo.derive.verify import compare, tolerance
from octavo.models.registry import FAMILIES

NUM_LAYERS = 4

SMALL = {
    2: (
        *("n_group", "num_expert_group", "n_shared_experts", "num_shared_experts", "top_k_experts"),
        *("moe_num_shared_experts", "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        *("moe_k", "moe_top_k", "num_local_experts_per_tok", "n_head_kv", "type_vocab_size"),
        *("num_key_value_heads", "swa_num_key_value_heads", "num_query_groups", "num_hash_layers"),
        *("num_global_key_value_heads", "linear_num_key_heads", "index_n_heads", "o_groups"),
        *("layers_block_group", "H_cycles", "L_cycles", "num_layers_per_stack", "mamba_n_groups"),
        *("num_kv_shared_layers", "hc_mult", "n_mamba_heads"),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
        *("decoder_attention_heads", "attention_heads", "swa_num_attention_heads"),
        "zero_expert_num",
        *("linear_num_value_heads", "linear_num_heads", "index_topk", "index_topk_blocks"),
        *("num_encoder_attention_heads", "num_decoder_attention_heads", "index_block_size"),
    ),
    8: (
        *("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "d_rel"),
        *("qk_rope_head_dim", "rotary_dim", "time_step_rank", "mamba_dt_rank", "state_size"),
        *("gated_norm_rank", "hidden_size_per_layer_input", "laurel_rank", "hc_lowrank"),
    ),
    16: (
        *("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels", "swa_head_dim", "d_head"),
        *("index_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("dim_head", "attention_head_size", "global_head_dim", "head_size", "mamba_d_state"),
        *("o_lora_rank", "mamba_headdim", "mamba_d_head", "query_pre_attn_scalar"),
    ),
    20: (
        *("sliding_window", "sliding_window_size", "window_size", "local_attention"),
        *("attention_chunk_size", "attention_window_size", "keep_window_size", "rel_extent"),
    ),
    24: ("qk_head_dim", "q_lora_rank", "kv_lora_rank"),
    32: ("attention_head_dim", "mamba_chunk_size", "router_hidden_size", "adapter_rank"),
    64: (
        *("hidden_size", "d_model", "n_embd", "d_embed", "attention_hidden_size", "embedding_size"),
        *("lru_width", "embedding_dim", "emb_dim", "input_embedding_size", "output_embedding_size"),
        *("pronunciation_embed_dim", "shape_embed_dim", "dim_model_base", "backbone_hidden_size"),
        *("ple_embed_dim", "max_inference_chunksize"),
    ),
    96: (
        *("intermediate_size", "moe_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"),
        *("ffn_dim", "shared_expert_intermediate_size", "shared_experts_intermediate_size"),
        *("dense_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size", "dff", "dim_ff"),
        *("shared_intermediate_size", "d_inner", "feed_forward_size", "intermediate_size_mlp"),
        *("moe_shared_expert_intermediate_size", "prefix_dense_intermediate_size", "n_inner"),
    ),
    300: (
        *("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "shape_vocab_size"),
        *("ngram_vocab_size_base", "encoder_hash_byte_group_vocab", "pronunciation_vocab_size"),
    ),
    512: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"),
}
"""Largest value of each size."""

LIMITS = {name: limit for limit, names in SMALL.items() for name in names}

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
"""Names of the number of layers."""

OPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "ministral": {"head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "xmod": {"default_language": "en_XX"},
}
"""Values that the defaults above do not give consistently."""


def tiny_config(model_type: str) -> dict[str, Any]:
    """Returns a config.json; raises what the config class raises on sizes that it rejects."""
    kind = transformers.CONFIG_MAPPING[model_type]
    values = _shrink(kind().to_dict()) | OPTIONS.get(model_type, {})
    if values.get("is_decoder") is False:
        values["is_decoder"] = True
    config: dict[str, Any] = kind.from_dict(values).to_dict()
    return config


def _shrink(config: dict[str, Any]) -> dict[str, Any]:
    config = {key: each for key, each in config.items() if key != "transformers_version"}
    total = next((config[key] for key in LAYERS if type(config.get(key)) is int), 0)
    layers = _chosen_layers(config, total)
    for key, value in config.items():
        if isinstance(value, dict) and value and all(str(each).isdigit() for each in value):
            chosen = enumerate(layers)
            config[key] = {i: value[layer] for i, layer in chosen if layer in value}
        elif isinstance(value, dict) and not key.startswith(("rope", "id2label", "label2id")):
            config[key] = _shrink(value)
        elif isinstance(value, list) and total > 1 and len(value) == total:
            config[key] = [_at_most(key.removesuffix("_per_layer"), value[i]) for i in layers]
        elif key in LAYERS or key == "encoder_layers":
            config[key] = min(value, NUM_LAYERS) if type(value) is int else value
        elif key.endswith(("token_id", "token_index")) and type(value) is int:
            config[key] = min(value, 2)
        else:
            config[key] = _at_most(key, value)
    if config.get("kv_lora_rank") and config.get("num_key_value_heads"):  # every head has its own
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config.get("kv_lora_rank") and config.get("head_dim"):
        config["head_dim"] = config["qk_rope_head_dim"]
    if config.get("topk_group"):
        config["topk_group"] = 1
    return config


def _at_most(key: str, value: Any) -> Any:
    limit = LIMITS.get(key)
    return min(value, limit) if type(value) is int and limit is not None else value


def _chosen_layers(config: dict[str, Any], total: int) -> list[int]:
    """Returns layers with one of each kind that the config's lists name, in order."""
    lists = [each for each in config.values() if isinstance(each, list) and len(each) == total]
    kinds = [repr([each[i] for each in lists]) for i in range(total)]
    chosen = sorted({kinds.index(kind) for kind in kinds})[:NUM_LAYERS]
    others = (i for i in range(total) if i not in chosen)
    return sorted([*chosen, *islice(others, NUM_LAYERS - len(chosen))])


def outcome(model_type: str, config: dict[str, Any] | None = None) -> str:
    """Derives one type; returns its line."""
    try:
        config = config or tiny_config(model_type)
    except Exception as error:
        return f"no tiny config: {_line(error)}"
    try:
        program = derive(config, lambda _line: None)
    except UnsupportedModel as error:
        reason = _line(error).rpartition("cannot be derived from transformers: ")[2]
        reason = reason.partition(" hint:")[0]
        what = (
            "not a decoder" if "not a decoder" in reason or "not causal" in reason else "rejected"
        )
        return f"{what}: {reason}"
    difference = compare(program, config)
    return (
        "exact" if difference <= tolerance(program) else f"wrong: logits differ by {difference:.1e}"
    )


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _child(model_type: str, covered: bool, pipe: multiprocessing.connection.Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    try:
        pipe.send(outcome(model_type, _covered_config(model_type) if covered else None))
    except BaseException as error:
        pipe.send(f"failed: {_line(error)}" if isinstance(error, Exception) else "failed")


def _covered_config(model_type: str) -> dict[str, Any]:
    """Returns the config of a tiny model from the tests, if they have one."""
    from tests.support.tiny_models import FAMILIES as TINY
    from tests.support.tiny_models import tiny_model

    config: dict[str, Any] = tiny_model(model_type).config if model_type in TINY else {}
    return config or tiny_config(model_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--covered", action="store_true", help="derive Octavo's own families")
    parser.add_argument("--limit", type=float, default=120, help="seconds per type")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    known = causal & set(FAMILIES) if options.covered else causal - set(FAMILIES)
    waiting = options.types or sorted(known)
    context = multiprocessing.get_context("fork")
    running: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name, waiting = waiting[0], waiting[1:]
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, options.covered, theirs))
            process.start()
            theirs.close()
            running[name] = process, ours, time.monotonic()
        multiprocessing.connection.wait([each for _, each, _ in running.values()], 1)
        for name, (process, pipe, start) in [*running.items()]:
            elapsed = time.monotonic() - start
            if not pipe.poll() and process.is_alive() and elapsed < options.limit:
                continue
            try:
                line = pipe.recv() if pipe.poll() else f"rejected: no result in {elapsed:.0f} s"
            except EOFError:
                line = "rejected: the process died"
            process.kill()
            process.join()
            del running[name]
            counts[line.partition(":")[0]] += 1
            print(f"{name:24} {elapsed:4.0f} s  {line}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))


if __name__ == "__main__":
    main()
