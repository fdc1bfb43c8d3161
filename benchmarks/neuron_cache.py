"""One stream of a model whose feed-forward weights are read neuron by neuron, beside the same
memory with whole products read in their order.

    python benchmarks/neuron_cache.py --weights-dir DIRECTORY

Generates tokens behind a page of Opticks and prints a JSON line per way: tokens a second, bytes
read for each token, the share of used neurons that were found in memory, and with a lookahead the
share of what it read that was then used. Ways: whole layers, pinned products, neurons by their
gates (with windows, with the calibration's hot neurons pinned, and with as many chosen at random),
and neurons by a predictor, with and without a lookahead. The model is calibrated first where no
--calibration is given, by the same text's first tokens; with `exact` no gates are taken for zero,
and nothing is predicted. What neurons a token uses depends on the model alone, so shares and bytes
are the same on any machine; tokens a second want one that does nothing else. With SmolLM2 it takes
about three minutes on two cores.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from octavo import LLM, SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.step import WeightArrivals
from octavo.sparsity.activation_curves import Calibration
from octavo.sparsity.calibrate import calibrate_model

TEXT = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
SEED = 17
TOKENS = 4096
"""Tokens of the text that a model is calibrated with."""
RANK = 64


def calibrated(model: str, directory: str) -> Path:
    """Calibrates a model in int8, predictors included; returns the file."""
    config = EngineConfig.from_options(model=model, backend="native", quantization="int8")
    text = TEXT.read_text(encoding="utf-8")
    found = calibrate_model(
        config, text, num_tokens=TOKENS, report=lambda line: None, predictor_rank=RANK
    )
    path = Path(directory) / "calibration.json"
    found.save(path)
    return path


def shuffled(calibration: Path, directory: str) -> str:
    """Writes the calibration with the counts of each layer's neurons dealt out at random."""
    found = msgspec.json.decode(calibration.read_bytes(), type=Calibration)
    deal = random.Random(SEED)
    layers = []
    for layer in found.neurons:
        counts = list(layer.counts)
        deal.shuffle(counts)
        layers.append(msgspec.structs.replace(layer, counts=counts))
    path = Path(directory) / "random.json"
    msgspec.structs.replace(found, neurons=layers).save(path)
    return str(path)


def measured(options: dict[str, Any], prompt: int, output: int) -> dict[str, Any]:
    """Runs one stream; returns its rate and what was read for each of its tokens but the first,
    which the prompt's step makes.
    """
    started = time.monotonic()
    with LLM(**options, report=lambda line: None) as llm:
        start_s = time.monotonic() - started
        token_ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8")[: 8 * prompt])
        request = [{"prompt_token_ids": token_ids[:prompt]}]

        def run(tokens: int) -> tuple[float, WeightArrivals]:
            before, begun = llm.get_metrics().weights, time.monotonic()
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate(request, params)
            seconds, after = time.monotonic() - begun, llm.get_metrics().weights
            names = WeightArrivals.__struct_fields__
            return seconds, WeightArrivals(*(getattr(after, n) - getattr(before, n) for n in names))

        run(1)
        (first_s, first), (whole_s, whole) = run(1), run(output)
    found = whole.neurons_found - first.neurons_found
    used = found + whole.neurons_read - first.neurons_read
    count, seconds = output - 1, whole_s - first_s
    return {
        "tokens_per_second": round(count / seconds, 2),
        "first_token_s": round(first_s, 3),
        "bytes_per_token": round((whole.num_bytes - first.num_bytes) / count),
        "waited_share": round((whole.wait_s - first.wait_s) / seconds, 3),
        "neurons_per_token": round(used / count),
        "found_share": round(found / used, 4) if used else None,
        "foreseen_used_share": round(whole.neurons_foreseen_used / whole.neurons_foreseen, 4)
        if whole.neurons_foreseen
        else None,
        "start_s": round(start_s, 1),
    }


def ways(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """Returns the options of each way of using the same memory."""
    exact = args.ffn_sparsity == "exact"
    calibration = {} if exact else {"calibration": str(args.calibration)}
    sparse = {"ffn_sparsity": args.ffn_sparsity} | calibration
    found: list[dict[str, Any]] = [
        {"weights_schedule": "layers"},
        {"weights_schedule": "pinned"},
        {"weights_schedule": "pinned", **sparse},
    ]
    for cache in args.cache:
        usual = sparse | {"neuron_cache_bytes": cache}
        found.append(usual)
        found += [usual | {"neuron_window": window} for window in args.window]
        if args.calibration:
            found.append(usual | {"hot_neurons": str(args.calibration)})
            found.append(usual | {"hot_neurons": shuffled(args.calibration, directory)})
        if not exact:
            predicted = {
                "sparsity_predictor": str(args.calibration),
                "predicted_share": args.predicted_share,
                "neuron_cache_bytes": cache,
            }
            found += [predicted | {"weights_lookahead": layers} for layers in (0, *args.lookahead)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--weights-dir", required=True)
    parser.add_argument("--ffn-sparsity", default="gate:0.5", help="exact, or gate:SHARE")
    parser.add_argument("--calibration", type=Path, help="of the model in int8, with predictors")
    parser.add_argument("--memory", default="96MiB", help="weights_memory_bytes of all ways")
    parser.add_argument("--cache", nargs="+", default=["48MiB"], help="neuron_cache_bytes")
    parser.add_argument("--window", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--lookahead", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--predicted-share", type=float, default=0.5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=48)
    args = parser.parse_args()
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        if args.calibration is None and args.ffn_sparsity != "exact":
            args.calibration = calibrated(args.model, directory)
        for way in ways(args, directory):
            options = way | {
                "model": args.model,
                "backend": "native",
                "quantization": "int8",
                "weights_dir": args.weights_dir,
                "weights_memory_bytes": args.memory,
                "max_model_len": args.prompt + args.output + 16,
                "max_num_seqs": 1,
                "enable_prefix_caching": False,
            }
            figures = measured(options, args.prompt, args.output)
            named = {
                key: Path(value).stem if key == "hot_neurons" else value
                for key, value in way.items()
                if key not in ("calibration", "sparsity_predictor")
            }
            print(json.dumps(named | figures), flush=True)


if __name__ == "__main__":
    main()
