"""How many of the blocks of keys to which a token pays most attention the token before it has
chosen too: what a memory of chosen blocks would find, if the others lay in a file.

    python benchmarks/chosen_again.py

Blocks of 16 keys are chosen for each layer by the attention of all its heads together, a share of
them, always the first and the last two, as `--kv-selection` does; the attention is transformers',
over a window of Opticks with the weights of the file, and the choices are those of its second half.
Prints a JSON line for each
share: the share of a token's blocks that the one before has chosen, that any of the last eight
tokens has, and the bytes of keys and values that no such token has read, in a model of this shape
in bfloat16. Needs no quiet machine: a minute on two cores.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.text.tokenizer import load_tokenizer

TEXT = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
BLOCK = 16
LAST = 2
WHOLE_LAYERS = 2
"""First layers, which read all keys."""
MEMORY = 8
"""Tokens whose choices are remembered."""


def opened(name: str) -> Any:
    """Opens a model in transformers, in fp32, with the weights of its file dequantised."""
    checkpoint = open_checkpoint(resolve(name))
    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    weights = {
        name: torch.from_numpy(checkpoint.tensor(name).dequantize().copy())
        for name in checkpoint.names()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if not set(missing) <= {"lm_head.weight"} or unexpected:
        raise SystemExit(f"weights missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def block_masses(model: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """Returns the attention that each token of the second half pays to each block, by layer."""
    half = len(token_ids) // 2
    masses: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        weights = output[1][0].sum(dim=0)[half:]
        masses.append(weights.reshape(len(weights), -1, BLOCK).sum(dim=-1))

    hooks = [layer.self_attn.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model.model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return masses


def chosen(masses: torch.Tensor, first: int, share: float) -> list[set[int]]:
    """Returns the blocks that each row of `masses [T, B]` reads; its first row is token `first`."""
    found = []
    for at, row in enumerate(masses.tolist()):
        count = (first + at) // BLOCK + 1
        fixed = {0, *range(max(0, count - LAST), count)}
        order = sorted(range(count), key=lambda block: (block not in fixed, -row[block]))
        found.append(set(order[: max(4, math.ceil(share * count))]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a model that transformers knows")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.3, 0.2])
    args = parser.parse_args()
    model = opened(args.model)
    text = TEXT.read_text(encoding="utf-8")
    source = open_checkpoint(resolve(args.model)).tokenizer_source()
    assert source is not None, "a model of text has a tokenizer"
    tokenizer = load_tokenizer(source)
    token_ids = tokenizer.encode(text, add_special_tokens=False)[: args.context]
    masses = block_masses(model, token_ids)[WHOLE_LAYERS:]
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = BLOCK * config.num_key_value_heads * width * 2 * 2
    for share in args.shares:
        total = again = remembered = tokens = 0
        for layer in masses:
            rows = chosen(layer, len(token_ids) // 2, share)
            for at in range(MEMORY, len(rows)):
                total += len(rows[at])
                again += len(rows[at] & rows[at - 1])
                remembered += len(rows[at] & set().union(*rows[at - MEMORY : at]))
                tokens += 1
        print(
            json.dumps(
                {
                    "share": share,
                    "context": args.context,
                    "chosen_by_the_last": round(again / total, 4),
                    f"chosen_by_one_of_{MEMORY}": round(remembered / total, 4),
                    "block_bytes": block_bytes,
                    "new_bytes_a_token": round(
                        (total - remembered) / tokens * block_bytes * len(masses)
                    ),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
