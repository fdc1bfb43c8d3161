"""Keys that are chosen, in memory and in a file: what one stream of SmolLM2 at 4,096 tokens finds
in memory and what it reads, by the memory of the KV cache.

    python benchmarks/kv_spill.py --directory DIRECTORY --memory 80MiB 60MiB 40MiB

DIRECTORY must be on a disk. Prints a JSON line for the same choice with all keys in memory, then
two for each --memory with the others in a file, without and with --kv-spill-ahead: tokens a second
of one stream, the share of the blocks (of single layers) that its tokens ask for and find, bytes
read and written for each token, and seconds in which attentions waited, less what the prompt alone
took. Ends with an error where a line's tokens are not the first one's. SmolLM2's keys and values of
4,112 tokens take 104 MiB, the partial keys among them. Some 20 seconds for each line on two cores;
tokens a second want a machine that does nothing else.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

TEXT = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
FILE = "96MiB"


def measured(llm: LLM, *, context: int, output: int) -> tuple[dict[str, Any], list[int]]:
    """Returns what one stream asks for once its prompt is computed, and its tokens."""
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    prompt = token_ids[: context - output]
    found, shown = [], []
    for count in (1, output):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        (answer,) = llm.generate({"prompt_token_ids": prompt}, params)
        found.append(answer)
        shown.append(llm.get_metrics().counters)
    before, after = shown

    def moved(name: str) -> float:
        return after.get(f"kv_spill_{name}", 0) - 2 * before.get(f"kv_spill_{name}", 0)

    num_tokens = output - 1  # the first one of both comes from the prompt
    asked, read = moved("found") + moved("read"), moved("read")
    timings = found[1].timings
    assert timings is not None
    return {
        "tokens_per_second": round(num_tokens / timings.decode_s, 2),
        "asked_a_token": round(asked / num_tokens, 1),
        "found": round(1 - read / asked, 4) if asked else None,
        "read_bytes_a_token": round(moved("read_bytes") / num_tokens),
        "written_bytes_a_token": round(moved("written_bytes") / num_tokens),
        "foreseen_and_used": after.get("kv_spill_foreseen_used", 0),
        "waited_s": round(moved("wait_seconds"), 2),
        "prompt_s": round(timings.prefill_s, 2),
    }, list(found[1].outputs[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", required=True)
    parser.add_argument("--memory", nargs="+", default=["80MiB", "60MiB", "40MiB"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--file", default=FILE, help="size of the file, for other models")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}), flush=True)
    wanted = None
    lines = [(memory, ahead) for memory in args.memory for ahead in (False, True)]
    for memory, ahead in ((None, False), *lines):
        way: dict[str, Any] = {"kv_cache_memory_bytes": "512MiB"}
        if memory is not None:
            way = {
                "kv_cache_memory_bytes": memory,
                "kv_spill_dir": args.directory,
                "kv_spill_bytes": args.file,
                "kv_spill_ahead": ahead,
            }
        with LLM(
            model=args.model,
            backend="native",
            quantization="int8",
            threads=args.threads,
            max_model_len=args.context + 16,
            max_num_seqs=1,
            enable_prefix_caching=False,
            kv_selection="speculated",
            kv_budget=args.budget,
            report=lambda line: None,
            **way,
        ) as llm:
            line, token_ids = measured(llm, context=args.context, output=args.output)
        wanted = wanted or token_ids
        if token_ids != wanted:
            raise SystemExit(f"other tokens with {memory} than with all keys in memory")
        head = {"memory": memory, "ahead": ahead, "budget": args.budget, "context": args.context}
        print(json.dumps(head | line), flush=True)


if __name__ == "__main__":
    main()
