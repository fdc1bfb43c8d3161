"""How well the transfer of a prompt's blocks hides behind its computing, over a link of a given
rate.

    python -m benchmarks.transfer_hidden [--rate 1gbit] [--tokens 2048] [--rounds 3]

Two servers of random weights in the shapes of Qwen2-0.5B, one thread each, on two machines, which
are network namespaces (root is needed). For each round the first token of a prompt is timed on the
prefill server alone and then, of another prompt, on the decoding one; decoding is to start at most
5% after the later of the end of the prefill and bytes / the link's rate. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.compare import machine
from benchmarks.engines.servers import END_S, is_healthy
from octavo.utils.child_process import end_process
from tests.support.two_machines import ADDRESSES, TwoMachines, two_machines

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GOAL = 1.05
SECRET = "benchmark"
KEY = {"Authorization": f"Bearer {SECRET}"}


@contextmanager
def server(machines: TwoMachines, at: int, model: Path, *flags: str) -> Iterator[str]:
    """Runs a server on one of the machines; yields its URL."""
    command = [*machines.within(at), sys.executable, "-m", "octavo.cli.main", "serve", str(model)]
    command += ["--load-format=dummy", "--skip-tokenizer-init", "--quantization=int8"]
    command += ["--max-model-len=4096", "--kv-cache-memory-bytes=256MiB", "--threads=1"]
    command += [f"--host={ADDRESSES[at]}", "--port=8000", *flags]
    # Both have the same port; what a server keeps on disk is named after it.
    command += [f"--kv-transfer-secret={SECRET}", f"--state-dir={model / f'state-{at}'}"]
    running = subprocess.Popen(command, env=os.environ | {"OCTAVO_API_KEY": SECRET})
    url = f"http://{ADDRESSES[at]}:8000"
    try:
        if not machines.call(0, lambda: is_healthy(running, url)):
            raise SystemExit(f"{url} does not come up")
        yield url
    finally:
        running.terminate()
        end_process(running, END_S)


def ttft(url: str, num_tokens: int, seed: int) -> float:
    """Returns the seconds until a new prompt has its first token."""
    prompt = [random.Random(seed).randrange(1000, 100_000) for _ in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=120).raise_for_status()
    return time.perf_counter() - began


def fetched_bytes(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers=KEY).text
    return sum(map(float, re.findall(r"^octavo:kv_fetched_bytes_total\S* (\S+)$", text, re.M)))


def bits(rate: str) -> float:
    units = {"mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", default="zmq", choices=["zmq", "mooncake", "nixl"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, two_machines(args.rate) as machines:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        address = f"{ADDRESSES[1]}:8998"
        prefill_flags = ["--role=prefill", f"--kv-transfer-address={address}"]
        decode_flags = ["--role=decode", f"--prefill-peer={address}"]
        decode_flags += ["--kv-transfer-min-tokens=32"]
        way = f"--kv-transfer={args.transport}"
        with (
            server(machines, 1, Path(folder), way, *prefill_flags) as prefill,
            server(machines, 0, Path(folder), way, *decode_flags) as decode,
        ):
            time.sleep(2)
            rows = [
                machines.call(0, lambda turn=turn: measured(prefill, decode, args, turn))
                for turn in range(args.rounds + 1)
            ][1:]
    ratios = [row["decode_s"] / max(row["prefill_s"], row["link_s"]) for row in rows]
    print(
        json.dumps(
            {
                "machine": machine(),
                "rate": args.rate,
                "transport": args.transport,
                "tokens": args.tokens,
                **{
                    name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]
                },
                "ratio": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "goal": GOAL,
            }
        )
    )


def measured(prefill: str, decode: str, args: argparse.Namespace, turn: int) -> dict[str, float]:
    """Times a prompt on the prefill server, and another one through the decoding server."""
    prefill_s = ttft(prefill, args.tokens, 2 * turn)
    before = fetched_bytes(decode)
    decode_s = ttft(decode, args.tokens, 2 * turn + 1)
    num_bytes = fetched_bytes(decode) - before
    if not num_bytes:
        raise SystemExit("no block came: the servers have not met")
    return {"prefill_s": prefill_s, "decode_s": decode_s, "link_s": 8 * num_bytes / bits(args.rate)}


if __name__ == "__main__":
    main()
