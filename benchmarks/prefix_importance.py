"""Time to the first token of prompts whose beginning lies in files, and what they lose, where a
share of its blocks is loaded by importance.

    python benchmarks/prefix_importance.py --directory DIRECTORY

Prompts are a page of Opticks that an earlier engine has left in files, and the text's next tokens;
the model then writes on as the text has it. Reads of files are paced to a slow disk's rate, 100
MB/s, in the thread that makes them, so the system's cache of files does not matter. Prints a JSON
line for the page computed, loaded whole, and loaded in part: the mean time to the first token, the
share of it that loading the whole page takes, the reads and bytes of each prompt, the perplexity of
the following text, and at how many of its tokens the likeliest one is that of the whole page. Takes
about two minutes on two cores; times want a machine that does nothing else, and reads and bytes do
not mind.
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.engine import core
from octavo.worker.kv_connectors import block_directory, tiers

TEXT = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
WRITTEN_S = 120.0
"""Seconds in which an engine that ends has to have written its blocks; a busy machine needs them.
"""
OVERDUE_S = 0.002
"""Seconds that the thread may wake late before the disk counts as having stood still."""


class SlowDisk:
    """Reads of block files that take as long as a disk of a rate would need."""

    def __init__(self, bytes_per_s: float) -> None:
        self.num_reads = self.num_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._read = block_directory.read_block_file

    def read(self, path: Path, header: bytes, into: memoryview) -> None:
        began = time.perf_counter()
        self._read(path, header, into)
        self.num_reads += 1
        self.num_bytes += len(into)
        begins = began if began - self._free_at > OVERDUE_S else self._free_at
        self._free_at = begins + len(into) / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


def engine(
    args: argparse.Namespace, load: float | None, directory: Path | None, *, num_pages: int = 1
) -> LLM:
    """Returns an engine that loads a share of a prefix; without a directory it computes all. One
    that leaves pages in files needs KV for all of them, until they are saved.
    """
    stored: dict[str, Any] = {}
    if directory is not None:
        stored = {"prefix_cache_dir": str(directory), "prefix_cache_size": "4GiB"}
    if load is not None:
        stored |= {"prefix_cache_policy": "importance", "prefix_cache_load": load}
    return LLM(
        model=args.model,
        backend="native",
        quantization="int8",
        threads=args.threads,
        max_model_len=args.prefix + args.question + args.output + 16,
        max_num_seqs=num_pages,
        report=lambda line: None,
        logits_processors=["forced_text:follow"],
        logits_processor_timeout=60,
        **stored,
    )


def measured(
    llm: LLM, windows: list[list[int]], args: argparse.Namespace, disk: SlowDisk
) -> dict[str, Any]:
    """Returns what the prompts took, and the logprobs and likeliest tokens of what follows them."""
    import forced_text

    reads_before, bytes_before = disk.num_reads, disk.num_bytes
    first_s, total, likeliest = 0.0, 0.0, []
    for ids in windows:
        found = forced_text.followed(llm, ids, args.prefix + args.question, logprobs=1)
        sample = found.outputs[0]
        for token_id, logprobs in zip(sample.token_ids, sample.logprobs, strict=True):
            total -= logprobs[token_id].logprob
            likeliest.append(max(logprobs, key=lambda each: logprobs[each].logprob))
        assert found.timings is not None
        first_s += found.timings.queued_s + found.timings.prefill_s
    return {
        "first_token_s": round(first_s / len(windows), 4),
        "reads": (disk.num_reads - reads_before) // len(windows),
        "read_bytes": (disk.num_bytes - bytes_before) // len(windows),
        "perplexity": round(math.exp(total / len(likeliest)), 4),
        "likeliest": likeliest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", required=True, help="for the files, which are removed again")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--prefix", type=int, default=2048, help="tokens in files")
    parser.add_argument("--question", type=int, default=32, help="tokens that are computed")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--disk-bytes-per-second", type=float, default=100e6)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))
    disk = SlowDisk(args.disk_bytes_per_second)
    block_directory.read_block_file = disk.read  # type: ignore[assignment]
    core.CLOSE_S = tiers.CLOSE_S = WRITTEN_S
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}), flush=True)
    root = Path(args.directory) / "prefix-importance"
    length = args.prefix + args.question + args.output
    with engine(args, None, None) as llm:
        text = TEXT.read_text(encoding="utf-8")
        token_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    windows = [token_ids[at * length : (at + 1) * length] for at in range(args.windows)]
    if len(windows[-1]) < length:
        raise SystemExit(f"the text has no {args.windows} windows of {length} tokens")
    expected: list[int] | None = None
    whole_s: float | None = None
    for name, load in [("computed", None), ("whole", None), *(("part", x) for x in args.loads)]:
        directory = None if name == "computed" else root / f"{name}-{load}"
        if directory is not None:
            with engine(args, load, directory, num_pages=len(windows)) as llm:
                pages = [{"prompt_token_ids": ids[: args.prefix + 1]} for ids in windows]
                llm.generate(pages, SamplingParams(temperature=0, max_tokens=1))
        with engine(args, load, directory) as llm:
            found = measured(llm, windows, args, disk)
            left_out = llm.get_metrics().left_out_blocks
        if name == "whole":
            whole_s = found["first_token_s"]
        of_whole = {} if whole_s is None else {"of_whole": found["first_token_s"] / whole_s}
        likeliest = found.pop("likeliest")
        expected = expected or likeliest
        same = sum(one == other for one, other in zip(likeliest, expected, strict=True))
        print(
            json.dumps(
                {"page": name, "load": load if name == "part" else 1.0, "prefix": args.prefix}
                | found
                | {each: round(share, 3) for each, share in of_whole.items()}
                | {"agreement": round(same / len(likeliest), 4), "left_out_blocks": left_out}
            ),
            flush=True,
        )
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
