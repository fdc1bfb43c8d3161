"""One stream of an OPT shape with `ffn_sparsity="exact"` and without, in turns, at planted shares
of zeros: random weights, and biases that leave the share of inputs that is named.

    python benchmarks/relu_skip.py --zeros 0.5 --zeros 0.7 --zeros 0.9 --quantization int8

The zeros are synthetic: they say what the kernels gain at a sparsity, nothing about the sparsity
of a trained model. Prints a JSON line for each share, with the ratio of medians. Needs the package
safetensors (extra `dev`), and a machine that does nothing else.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from octavo import LLM, SamplingParams

HIDDEN, WIDTH, LAYERS, HEADS, VOCABULARY = 2048, 8192, 4, 16, 1024
DEVIATION = 0.02
TOKENS = 48


def write_model(directory: Path, zeros: float) -> None:
    """Writes an OPT of random weights in bf16, of whose FFN's inputs a share is zeros."""
    config = {
        "model_type": "opt",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 512,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (DEVIATION * draw.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)

    def constant(width: int, value: float) -> np.ndarray:
        return np.full(width, value, ml_dtypes.bfloat16)

    # Behind a norm a number of the FFN has this deviation, so that this bias leaves the share.
    deviation = DEVIATION * HIDDEN**0.5
    bias = -statistics.NormalDist().inv_cdf(zeros) * deviation
    tensors = {
        "model.decoder.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.decoder.embed_positions.weight": matrix(514, HIDDEN),
    }
    norms = ["model.decoder.final_layer_norm"]
    for layer in range(LAYERS):
        block = f"model.decoder.layers.{layer}"
        norms += [f"{block}.self_attn_layer_norm", f"{block}.final_layer_norm"]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors[f"{block}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
            tensors[f"{block}.self_attn.{name}.bias"] = constant(HIDDEN, 0)
        tensors[f"{block}.fc1.weight"] = matrix(WIDTH, HIDDEN)
        tensors[f"{block}.fc1.bias"] = constant(WIDTH, bias)
        tensors[f"{block}.fc2.weight"] = matrix(HIDDEN, WIDTH)
        tensors[f"{block}.fc2.bias"] = constant(HIDDEN, 0)
    for name in norms:
        tensors |= {f"{name}.weight": constant(HIDDEN, 1), f"{name}.bias": constant(HIDDEN, 0)}
    save_file(tensors, directory / "model.safetensors")


def tokens_per_s(llm: LLM) -> tuple[float, list[int]]:
    """Returns the rate of one stream after its first token, and its tokens."""
    prompt = {"prompt_token_ids": [*range(5, 13)]}
    seconds, tokens = [], []
    for count in (1, TOKENS + 1):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        tokens = list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        seconds.append(time.perf_counter() - began)
    return TOKENS / (seconds[1] - seconds[0]), tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zeros", type=float, action="append", required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    weights = args.quantization or args.dtype
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "weights": weights}))
    for zeros in args.zeros:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), zeros)
            engines = [
                LLM(
                    folder,
                    dtype=args.dtype,
                    quantization=args.quantization,
                    skip_tokenizer_init=True,
                    enable_prefix_caching=False,
                    kv_cache_memory_bytes=256 << 20,
                    ffn_sparsity=sparsity,
                    report=lambda text: None,
                )
                for sparsity in (None, "exact")
            ]
            rates: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                outputs = []
                for llm, found in zip(engines, rates, strict=True):
                    rate, tokens = tokens_per_s(llm)
                    found.append(round(rate, 2))
                    outputs.append(tokens)
                assert outputs[0] == outputs[1], "other tokens"
            dense, skipping = (statistics.median(each) for each in rates)
            line = {"zeros": zeros, "dense": rates[0], "exact": rates[1]}
            print(json.dumps(line | {"ratio": round(skipping / dense, 3)}), flush=True)
            for llm in engines:
                llm.close()


if __name__ == "__main__":
    main()
