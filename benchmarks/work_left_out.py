"""What SmolLM2 loses and gains where generated tokens leave work out by a guess: neurons that a
predictor does not name, keys to which little attention would go.

    python benchmarks/work_left_out.py --what neurons
    python benchmarks/work_left_out.py --what keys --context 4096

Perplexity is that of the second halves of windows of Opticks, which the model generates token by
token as the text has them (`benchmarks/perplexity.py` has the recipe); tokens a second are those of
one stream in the same run. Prints a JSON line for each share, the first one being the engine that
leaves nothing out, and for predictors one with the recall on text that they were not made of. The
text's last part makes the predictors, its first windows are measured. Each --what takes about three
minutes on two cores; tokens a second want a machine that does nothing else.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo import LLM
from octavo.config.engine_config import EngineConfig
from octavo.sparsity.calibrate import calibrate_model
from octavo.sparsity.neuron_predictors import SHARES

TEXT = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
MEASURED_CHARACTERS = 16_000
"""Beginning of the text, of which predictors are not made: windows of it are measured."""


def predictors(model: str, directory: str, *, tokens: int, rank: int) -> tuple[str, dict[str, Any]]:
    """Makes predictors; returns their file, and what they find."""
    config = EngineConfig.from_options(model=model, backend="native", quantization="int8")
    text = TEXT.read_text(encoding="utf-8")[MEASURED_CHARACTERS:]
    began = time.perf_counter()
    found = calibrate_model(
        config, text, num_tokens=tokens, report=lambda line: None, predictor_rank=rank
    )
    path = Path(directory) / "predictors.json"
    found.save(path)
    recall = {
        share: [each.recall[SHARES.index(share)] for each in found.predictors]
        for share in (0.2, 0.3, 0.5, 0.7)
    }
    return str(path), {
        "rank": rank,
        "tokens": found.num_tokens,
        "seconds": round(time.perf_counter() - began, 1),
        "recall": {share: round(sum(each) / len(each), 4) for share, each in recall.items()},
        "least_recall": {share: round(min(each), 4) for share, each in recall.items()},
    }


def generated(llm: LLM, *, context: int, output: int, num_windows: int) -> dict[str, float]:
    """Returns the perplexity of the last tokens of windows of the text, each a stream of its own,
    and the tokens a second of their generation.
    """
    import forced_text

    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = [token_ids[at * context : (at + 1) * context] for at in range(num_windows)]
    if len(windows[-1]) < context:
        raise SystemExit(f"the text has no {num_windows} windows of {context} tokens")
    total, seconds = 0.0, 0.0
    for ids in windows:
        found = forced_text.followed(llm, ids, context - output, logprobs=0)
        sample = found.outputs[0]
        for token_id, logprobs in zip(sample.token_ids, sample.logprobs, strict=True):
            total -= logprobs[token_id].logprob
        assert found.timings is not None
        seconds += found.timings.decode_s
    count = output * num_windows
    return {
        "perplexity": round(math.exp(total / count), 4),
        "tokens_per_second": round((count - num_windows) / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("neurons", "keys"), required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        help="default 0.7 0.5 0.3 of neurons, 0.5 0.3 0.2 of keys",
    )
    parser.add_argument("--context", type=int, help="default 1024, with keys 4096")
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--windows", type=int, help="default 3, with keys 2")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="to make predictors of")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    keys = args.what == "keys"
    context = args.context or (4096 if keys else 1024)
    shares = args.shares or ([0.5, 0.3, 0.2] if keys else [0.7, 0.5, 0.3])
    sys.path.append(str(Path(__file__).parent))
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = ""
        if not keys:
            path, found = predictors(args.model, directory, tokens=args.tokens, rank=args.rank)
            print(json.dumps(found), flush=True)
        dense = None
        for share in (None, *shares):
            way: dict[str, Any] = {}
            if share is not None and keys:
                way = {"kv_selection": "speculated", "kv_budget": share}
            elif share is not None:
                way = {"sparsity_predictor": path, "predicted_share": share}
            with LLM(
                model=args.model,
                backend="native",
                quantization="int8",
                threads=args.threads,
                max_model_len=context + 16,
                max_num_seqs=1,
                enable_prefix_caching=False,
                report=lambda line: None,
                logits_processors=["forced_text:follow"],
                logits_processor_timeout=60,
                **way,
            ) as llm:
                measured = generated(
                    llm,
                    context=context,
                    output=args.output,
                    num_windows=args.windows or (2 if keys else 3),
                )
            dense = dense or measured["perplexity"]
            rise = {"rise_percent": round(100 * (measured["perplexity"] / dense - 1), 2)}
            print(
                json.dumps(
                    {"what": args.what, "share": share, "context": context} | measured | rise
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
