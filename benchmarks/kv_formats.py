"""Compares formats of a 3- or 4-bit KV cache on SmolLM2: KIVI, QuaRot, TurboQuant and others.

    python benchmarks/kv_formats.py --windows 1 --bits 4 --part keys

Keys (after RoPE), values or both are rounded to a format's values before attention; the others are
in bf16, and everything else is computed in fp32 by transformers. The text and its windows are those
of `perplexity.py`. Prints one line per format: bits per number with scales, perplexity and its rise
over a bf16 cache, and the mean KL divergence of the next token's distribution from that of a bf16
cache.

KIVI (Liu et al. 2024) keeps its last, incomplete group of 32 tokens in full precision. Here every
group is complete, since a window is computed in one step.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent.parent / "tests" / "data"
Format = Callable[[Tensor], Tensor]
"""Rounds `rows [1, K, T, width] fp32` to the stored values."""

LLOYD_MAX = {
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    2: (0.4528, 1.5104),
}
"""Positive levels of the optimal quantizer of a normal distribution (Max 1960)."""


def bf16(rows: Tensor) -> Tensor:
    return rows.bfloat16().float()


def hadamard(width: int) -> Tensor:
    """Returns the orthonormal block-diagonal Hadamard matrix of a width."""
    block = torch.ones(1, 1)
    while len(block) < width & -width:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / math.sqrt(len(block))] * (width // len(block)))


def rotated(form: Format, *, signs: bool = False) -> Format:
    """Returns a format in which rows are rotated first and rotated back afterwards."""

    def apply(rows: Tensor) -> Tensor:
        rotation = hadamard(rows.shape[-1])
        if signs:
            generator = torch.Generator().manual_seed(0)
            rotation = rotation * (2 * torch.randint(2, (rows.shape[-1],), generator=generator) - 1)
        return form(rows @ rotation.T) @ rotation

    return apply


def min_max(bits: int, axis: int, group: int | None = None) -> Format:
    """Returns uniform levels between the smallest and the largest number of each group."""

    def apply(rows: Tensor) -> Tensor:
        moved = rows.movedim(axis, -1)
        grouped = moved.unflatten(-1, (-1, group or moved.shape[-1]))
        low = grouped.amin(-1, keepdim=True).half().float()
        scale = ((grouped.amax(-1, keepdim=True) - low) / (2**bits - 1)).half().float()
        codes = ((grouped - low) / scale.clamp(min=1e-8)).round().clamp(0, 2**bits - 1)
        return (codes * scale + low).flatten(-2).movedim(-1, axis)

    return apply


def symmetric(bits: int) -> Format:
    """Returns uniform levels up to the largest magnitude of each row, as in an int8 cache."""

    def apply(rows: Tensor) -> Tensor:
        top = 2 ** (bits - 1) - 1
        scale = bf16(rows.abs().amax(-1, keepdim=True).clamp(min=1e-20) / top)
        return (rows / scale).round().clamp(-top, top) * scale

    return apply


def codebook(bits: int, scaling: str) -> Format:
    """Returns Lloyd-Max levels, as int8, times a scale per row.

    The scale is the root mean square (`rms`), the one with the least squared error for the codes
    that this gives (`fitted`), the one which keeps the product with the row (`unbiased`), or fitted
    after choosing codes again (`twice`).
    """
    positive = torch.tensor(LLOYD_MAX[bits])
    levels = (torch.cat([-positive.flip(0), positive]) * 127 / positive[-1]).round()
    bounds = (levels[1:] + levels[:-1]) / 2

    def apply(rows: Tensor) -> Tensor:
        scale = rows.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-20) * positive[-1] / 127
        found = levels[torch.bucketize((rows / scale).contiguous(), bounds)]
        if scaling == "unbiased":
            scale = rows.square().sum(-1, keepdim=True) / (rows * found).sum(-1, keepdim=True)
        for step in range({"fitted": 1, "twice": 2}.get(scaling, 0)):
            if step:
                found = levels[torch.bucketize((rows / scale).contiguous(), bounds)]
            products = (rows * found).sum(-1, keepdim=True)
            scale = (products / found.square().sum(-1, keepdim=True)).clamp(min=1e-20)
        return found * bf16(scale)

    return apply


def anchored(form: Format) -> Format:
    """Returns a format for the differences from the mean of the stored rows of the block before.

    Blocks have 16 tokens. The mean is stored in int8 with its block, and the first block has none:
    rows depend on their own prefix only. The first token is left out of the mean.
    """
    int8 = symmetric(8)

    def apply(rows: Tensor) -> Tensor:
        blocks = list(rows.split(16, 2))
        stored = [form(blocks[0])]
        for block in blocks[1:]:
            before = stored[-1][:, :, 1:] if len(stored) == 1 else stored[-1]
            mean = int8(before.mean(2, keepdim=True))
            stored.append(form(block - mean) + mean)
        return torch.cat(stored, 2)

    return apply


def formats(bits: int, width: int) -> dict[str, tuple[Format, Format, float]]:
    """Returns the formats of keys and of values, and their bits per number."""
    each = {
        "no rotation, Lloyd-Max, fitted": codebook(bits, "fitted"),
        "Hadamard, absmax": rotated(symmetric(bits)),
        "Hadamard, Lloyd-Max, rms": rotated(codebook(bits, "rms")),
        "TurboQuant: signs, Hadamard, Lloyd-Max, rms": rotated(codebook(bits, "rms"), signs=True),
        "Hadamard, Lloyd-Max, fitted": rotated(codebook(bits, "fitted")),
        "Hadamard, Lloyd-Max, fitted twice": rotated(codebook(bits, "twice")),
        "Hadamard, Lloyd-Max, unbiased": rotated(codebook(bits, "unbiased")),
    }
    anchors = anchored(each["Hadamard, Lloyd-Max, fitted"])
    quarot, groups = rotated(min_max(bits, 3)), min_max(bits, 3, 32)
    return {
        **{name: (form, form, bits + 16 / width) for name, form in each.items()},
        "the same, less the mean of the block before": (
            anchors,
            each["Hadamard, Lloyd-Max, fitted"],
            bits + 16 / width + 0.5,
        ),
        "QuaRot: Hadamard, min and max of a head": (quarot, quarot, bits + 32 / width),
        "KIVI: channels of 32 tokens, rows of 32": (min_max(bits, 2, 32), groups, bits + 1),
        "min and max of rows of 32": (groups, groups, bits + 1),
    }


class RoundedCache(DynamicCache):
    """A cache of one step, which rounds what it stores."""

    def __init__(self, keys: Format, values: Format) -> None:
        super().__init__()
        self._rounding = (keys, values)

    def update(self, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        keys, values = self._rounding
        return keys(k), values(v)


def load_network() -> LlamaForCausalLM:
    """Returns SmolLM2 in fp32, with the weights of its GGUF file dequantized."""
    checkpoint = open_checkpoint(resolve("smollm2"))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **{name: checkpoint.config[name] for name in (*names, *heads)},
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    network = LlamaForCausalLM(config).eval()
    weights = {
        name: torch.from_numpy(checkpoint.tensor(name).dequantize().copy())
        for name in checkpoint.names()
    }
    missing, unexpected = network.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"weights of SmolLM2: missing {missing}, unexpected {unexpected}")
    network.tie_weights()
    return network


def logprobs(network: LlamaForCausalLM, ids: Tensor, keys: Format, values: Format) -> Tensor:
    """Returns the logprobs `[T - 1, V]` of the tokens after the first."""
    found = network(ids[None], past_key_values=RoundedCache(keys, values), use_cache=True)
    return found.logits[0, :-1].log_softmax(-1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=6, help="how many of the 20 windows")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--part", choices=["keys", "values", "both"], default="both")
    parser.add_argument("--only", default="", help="formats whose name contains this")
    args = parser.parse_args()
    network, window = load_network(), json.loads((DATA / "opticks.json").read_text())["window"]
    width = network.config.hidden_size // network.config.num_attention_heads
    text = (DATA / "opticks.txt").read_text(encoding="utf-8")
    source = open_checkpoint(resolve("smollm2")).tokenizer_source()
    tokens = torch.tensor(load_tokenizer(source).encode(text, add_special_tokens=False))
    rows = {("int8", 8): (symmetric(8), symmetric(8), 8 + 16 / width)}
    for bits in args.bits:
        for name, form in formats(bits, width).items():
            if args.only in name:
                rows[name, bits] = form
    base, losses, divergences = 0.0, dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0.0)
    for start in range(0, args.windows * window, window):
        ids = tokens[start : start + window]
        expected = logprobs(network, ids, bf16, bf16)
        base -= expected.gather(1, ids[1:, None]).mean().item()
        for row, (keys, values, _) in rows.items():
            rounding = (
                keys if args.part != "values" else bf16,
                values if args.part != "keys" else bf16,
            )
            found = logprobs(network, ids, *rounding)
            losses[row] -= found.gather(1, ids[1:, None]).mean().item()
            divergences[row] += (expected.exp() * (expected - found)).sum(-1).mean().item()
    print(json.dumps({"format": "bf16", "perplexity": round(math.exp(base / args.windows), 4)}))
    for row, (*_, size) in rows.items():
        line = {"format": row[0], "part": args.part, "bits": row[1], "stored_bits": round(size, 2)}
        line["perplexity"] = round(math.exp(losses[row] / args.windows), 4)
        line["rise_percent"] = round(100 * math.expm1((losses[row] - base) / args.windows), 3)
        line["kl_divergence"] = round(divergences[row] / args.windows, 5)
        print(json.dumps(line))


if __name__ == "__main__":
    main()
