"""What adapters cost: decoded tokens/s of 32 streams under none, one and 32 of them, and a bound;
and of streams beside requests whose adapters have to be read.

    python benchmarks/adapters.py [--model qwen2-0.5b] [--rounds 5] [--streams 32] [--rank 16]
    python benchmarks/adapters.py --parts cold [--on-disk 1000] [--on-device 100]
    python benchmarks/adapters.py --parts llama-server --llama-server PATH --tokens 8 --rounds 2
    python benchmarks/adapters.py --parts vllm --vllm PYTHON_WITH_VLLM --tokens 8 --rounds 2

Without --model the model has the shape of Qwen2-0.5B and random weights of int8. The base takes no
adapters; an engine that does takes turns with it. Works:

- `none`: the engine with adapters, streams without;
- `q, v`: every stream its own adapter, on the products of queries and values;
- `all`: every stream its own, on all linears;
- `one`: all streams the same one, on all linears.

With `--lora-dtype bfloat16,int8` an engine for each precision that adapters are kept in takes its
turns; without, they are as their files have them, in bfloat16.

Each round measures the base once and each work once, in an order that is turned round from round
to round; a first round, which also reads the adapters, is not counted.

The bound is what the base's step takes and the reading of the adapters' matrices, at the rate that
the machine reads a set of their size. `cold` has streams under adapters on the device beside short
requests, some a second, whose adapters are on the device in one half of a round and on disk alone
in the other. Prints a JSON line for each figure, the median of the rounds.

`llama-server` runs the works on llama.cpp, its model in Q8_0, `vllm` on vLLM's CPU build in bf16,
each beside itself without adapters. Both take far more time under 32 adapters, so give them few
tokens: the commands above take two to three minutes. llama.cpp computes requests together only
if their adapters are the same: 32 different ones are answered one after the other. vLLM copies
the matrices of each row's adapter in every product. It leaves one core to its scheduler unless the
variable VLLM_CPU_OMP_THREADS_BIND says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import ml_dtypes
import numpy as np
from compare import machine
from engines import llama_server_adapters as peer
from safetensors.numpy import save_file

from octavo import LLM, AsyncLLM, LoRARequest, SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.wiring.backend import build_backend
from octavo.wiring.model import open_model

QWEN2_HALF_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SITES = {
    "q, v": ("self_attn.q_proj", "self_attn.v_proj"),
    "all": (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ),
}
PROMPT_TOKENS = 4
"""Few, so that a step computes the prompts of all streams and a run is nearly all decoding."""
PROBES_A_S = 4
"""Rate of the short requests beside the streams."""
PROBED_S = 5.0
"""Seconds of each half of a round of `cold`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: random weights of Qwen2-0.5B's shape")
    parser.add_argument("--options", default="{}", help="JSON of the engine's options")
    parser.add_argument("--parts", default="rates,cold", help="of rates, cold, llama-server, vllm")
    parser.add_argument("--llama-server", help="llama.cpp's own server")
    parser.add_argument("--llama-model", type=Path, help="GGUF file for it, of --model")
    parser.add_argument("--vllm", help="a Python that has vLLM's CPU build")
    parser.add_argument("--vllm-options", default="{}", help="JSON of more of its options")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-dtype", default="bfloat16", help="one or several, with commas")
    parser.add_argument("--on-disk", type=int, default=1000)
    parser.add_argument("--on-device", type=int, default=100)
    args = parser.parse_args()
    shown = {"machine": machine(), "load": os.getloadavg(), **vars(args)}
    print(json.dumps(shown, default=str), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        options = model_options(args.model, root) | json.loads(args.options)
        parts = args.parts.split(",")
        if unknown := set(parts) - {"rates", "cold", "llama-server", "vllm"}:
            parser.error(f"--parts: got {', '.join(unknown)}, see --help for what is allowed")
        if "rates" in parts:
            measure_rates(args, options, root)
        if "llama-server" in parts:
            measure_llama_server(args, options, root)
        if "vllm" in parts:
            measure_vllm(args, options, root)
        if "cold" in parts:
            asyncio.run(measure_cold(args, options, root))


def model_options(model: str | None, root: Path) -> dict:
    """Returns the options of the model; writes the config of the random one."""
    options: dict = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_seqs": 64,
    }
    if model is not None:
        return options | {"model": model}
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(QWEN2_HALF_BILLION))
    random = {"load_format": "dummy", "quantization": "int8"}
    return options | {"model": str(root / "model")} | random


# -- adapters --------------------------------------------------------------------------------------


def save_adapters(
    options: dict, root: Path, count: int, rank: int, sites: Sequence[str]
) -> list[LoRARequest]:
    """Writes adapters as PEFT does, of random numbers in bfloat16."""
    config = EngineConfig.from_options(**options)
    program = open_model(config).program()
    shapes = {
        weight.name.removesuffix(".weight"): weight.shape
        for weight in program.weights
        if weight.name.endswith(tuple(f"{site}.weight" for site in sites))
    }
    dice = np.random.default_rng(0)
    noise = (dice.standard_normal(1 << 20) * 1e-3).astype(ml_dtypes.bfloat16)
    requests = []
    for number in range(count):
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                start = int(dice.integers(len(noise) - shape[0] * shape[1]))
                numbers = noise[start : start + shape[0] * shape[1]].reshape(shape)
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = numbers
        path = root / f"{len(sites)}-{rank}" / str(number)
        requests.append(LoRARequest(f"{len(sites)}-{number}", number + 1, str(path)))
        if path.exists():
            continue
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors")
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*sites]}
        (path / "adapter_config.json").write_text(json.dumps(values))
    return requests


def kept_bytes(requests: Sequence[LoRARequest], dtype: str) -> int:
    """Returns the bytes that adapters have on the device; their files are in bfloat16."""
    return file_bytes(requests) * {"float32": 4, "bfloat16": 2, "int8": 1}[dtype] // 2


def file_bytes(requests: Sequence[LoRARequest]) -> int:
    return sum(
        (Path(each.lora_path) / "adapter_model.safetensors").stat().st_size for each in requests
    )


# -- rates -----------------------------------------------------------------------------------------


def works_of(
    args: argparse.Namespace, options: dict, root: Path
) -> dict[str, Sequence[LoRARequest | None]]:
    """Returns the adapters of each work's streams."""
    by_sites = {
        name: save_adapters(options, root, args.streams, args.rank, sites)
        for name, sites in SITES.items()
    }
    return {
        "none": [None] * args.streams,
        "q, v": by_sites["q, v"],
        "all": by_sites["all"],
        "one": [by_sites["all"][0]] * args.streams,
    }


def measure_rates(args: argparse.Namespace, options: dict, root: Path) -> None:
    """Prints the tokens/s of each work, its share of the base's, and of the bound."""
    works = works_of(args, options, root)
    quiet = {"report": lambda text: None}
    base = LLM(**options, **quiet)
    taking = quiet | {"enable_lora": True, "max_loras": 2 * args.streams}
    dtypes = args.lora_dtype.split(",")
    engines = {dtype: LLM(**options, **taking, lora_dtype=dtype) for dtype in dtypes}
    turns = [(name, dtype) for dtype in engines for name in works]
    base_rates: list[float] = []
    rates: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    for number in range(args.rounds + 1):
        base_rate = decode_rate(base, [None] * args.streams, args.tokens)
        found = {}
        for turn in turns if number % 2 else reversed(turns):
            name, dtype = turn
            if number == 0:
                decode_rate(engines[dtype], works[name], 2)  # which reads them
            found[turn] = decode_rate(engines[dtype], works[name], args.tokens)
        if number:
            base_rates.append(base_rate)
            for turn, rate in found.items():
                rates[turn].append(rate / base_rate)
    base_rate = statistics.median(base_rates)
    print(json.dumps({"work": "base", "tokens_per_s": round(base_rate, 1)}))
    for (name, dtype), shares in rates.items():
        used = [one for one in dict.fromkeys(works[name]) if one is not None]
        row = {"work": name, "lora_dtype": dtype}
        row |= {"share_of_base": round(statistics.median(shares), 3)}
        row |= {"range": [round(min(shares), 3), round(max(shares), 3)]}
        if used:
            num_bytes = kept_bytes(used, dtype)
            bandwidth = read_bandwidth(options, num_bytes)
            step_s = args.streams / base_rate
            bound = step_s / (step_s + num_bytes / bandwidth)
            row |= {
                "adapters_mb": round(num_bytes / 1e6, 1),
                "bandwidth_gb_s": round(bandwidth / 1e9, 1),
                "bound_of_base": round(bound, 3),
                "share_of_bound": round(statistics.median(shares) / bound, 3),
            }
        print(json.dumps(row), flush=True)


def decode_rate(llm: LLM, adapters: Sequence[LoRARequest | None], num_tokens: int) -> float:
    """Returns the tokens/s behind the first one of as many streams as there are adapters."""
    prompts = prompts_of(len(adapters))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    named = None if all(one is None for one in adapters) else list(adapters)
    outputs = llm.generate(prompts, params, lora_request=named, use_tqdm=False)
    faults = [output.error for output in outputs if output.error]
    if faults:
        raise SystemExit(faults[0])
    spent_s = max(output.timings.decode_s for output in outputs)
    return len(adapters) * (num_tokens - 1) / spent_s


def prompts_of(num_streams: int) -> list[list[int]]:
    """Returns a short prompt of token ids for each stream."""
    return [
        [(7 * stream + 3 * at) % 1000 + 5 for at in range(PROMPT_TOKENS)]
        for stream in range(num_streams)
    ]


def read_bandwidth(options: dict, num_bytes: int) -> float:
    """Returns the bytes/s that the engine's threads read of a set of that size."""
    backend = build_backend(open_model(EngineConfig.from_options(**options)).config)
    try:
        return backend.measure(num_bytes, "i8").bandwidth
    finally:
        backend.close()


# -- peers -----------------------------------------------------------------------------------------


def print_shares(engine: str, base: Sequence[float], rates: dict[str, list[float]]) -> None:
    """Prints a peer's tokens/s without adapters, and each work's share of it in its round."""
    base_rate = round(statistics.median(base), 1)
    print(json.dumps({"engine": engine, "work": "base", "tokens_per_s": base_rate}))
    for name, found in rates.items():
        shares = [rate / other for rate, other in zip(found, base, strict=True)]
        row = {"engine": engine, "work": name}
        row |= {"tokens_per_s": round(statistics.median(found), 1)}
        row |= {"share_of_base": round(statistics.median(shares), 3)}
        row |= {"range": [round(min(shares), 3), round(max(shares), 3)]}
        print(json.dumps(row), flush=True)


def measure_llama_server(args: argparse.Namespace, options: dict, root: Path) -> None:
    """Prints what llama-server makes of the works, beside one that was given no adapters."""
    if args.model is None:
        model = peer.write_qwen2(root / "model.gguf", QWEN2_HALF_BILLION)
    elif args.llama_model is None:
        raise SystemExit("--llama-model: got none, --model needs the same model as a GGUF file")
    else:
        model = args.llama_model
    architecture = peer.architecture_of(model)
    works = works_of(args, options, root)
    files: dict[str, Path] = {}
    for one in [one for adapters in works.values() for one in adapters if one is not None]:
        if one.lora_name not in files:
            path, target = Path(one.lora_path), root / f"{one.lora_name}.gguf"
            files[one.lora_name] = peer.write_adapter(path, target, architecture, args.rank)
    places = {name: place for place, name in enumerate(files)}
    ids = {
        name: [None if one is None else places[one.lora_name] for one in adapters]
        for name, adapters in works.items()
    }
    streams = peer.Streams(prompts_of(args.streams), args.tokens)
    base: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in works}
    binary = args.llama_server
    with (
        peer.serving(binary, model, args.streams) as plain_url,
        peer.serving(binary, model, args.streams, list(files.values())) as url,
    ):
        streams.seconds(plain_url, ids["none"], 2)
        for adapters in ids.values():
            streams.seconds(url, adapters, 2)
        for _ in range(args.rounds):
            base.append(streams.rate(plain_url, ids["none"]))
            for name, adapters in ids.items():
                rates[name].append(streams.rate(url, adapters))
    print_shares("llama-server", base, rates)


def measure_vllm(args: argparse.Namespace, options: dict, root: Path) -> None:
    """Prints vLLM's tokens/s without adapters, and each work's share of it."""
    works = {
        name: [[one.lora_name, one.lora_int_id, one.lora_path] if one else None for one in adapters]
        for name, adapters in works_of(args, options, root).items()
    }
    dummy = {"load_format": "dummy"} if options.get("load_format") == "dummy" else {}
    job = {
        "model": options["model"],
        "options": dummy | json.loads(args.vllm_options),
        "prompts": prompts_of(args.streams),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "rank": args.rank,
    }
    nothing = {"none": works["none"]}
    base = vllm_rates(args.vllm, job | {"works": nothing, "enable_lora": False})["none"]
    print_shares("vllm", base, vllm_rates(args.vllm, job | {"works": works, "enable_lora": True}))


def vllm_rates(python: str, job: dict) -> dict[str, list[float]]:
    """Returns the tokens/s of each work and round."""
    script = Path(__file__).parent / "engines" / "vllm_adapters.py"
    ended = subprocess.run(
        [python, str(script)], input=json.dumps(job), text=True, stdout=subprocess.PIPE, check=True
    )
    # Its own lines of log come on standard output too.
    found = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    rates: dict[str, list[float]] = json.loads(found[-1].removeprefix("RESULT "))
    return rates


# -- cold adapters ---------------------------------------------------------------------------------


async def measure_cold(args: argparse.Namespace, options: dict, root: Path) -> None:
    """Prints what a cold adapter's first token waits for, and what others lose beside it."""
    adapters = save_adapters(options, root, args.on_disk, args.rank, SITES["q, v"])
    llm = AsyncLLM.from_options(
        **options, enable_lora=True, max_loras=args.on_device, report=lambda text: None
    )
    try:
        for adapter in adapters:
            llm.adapter(adapter)  # as a server does that is given their names
        warm, cold = adapters[: args.on_device // 2], iter(adapters[args.on_device :])
        await asyncio.gather(*(first_token_s(llm, adapter) for adapter in warm))
        rates: dict[str, list[float]] = {"warm": [], "cold": []}
        waits: dict[str, list[float]] = {"warm": [], "cold": []}
        for number in range(args.rounds + 1):
            for kind in ("warm", "cold") if number % 2 else ("cold", "warm"):
                count = round(PROBED_S * PROBES_A_S)
                probes = list(islice(cold if kind == "cold" else cycle(warm), count))
                rate, found = await probed(llm, warm[-8:], probes)
                if number:
                    rates[kind].append(rate)
                    waits[kind] += found
    finally:
        llm.close()
    read_s = statistics.median(
        seconds_to_read(Path(adapter.lora_path)) for adapter in adapters[-20:]
    )
    ratios = [cold / warm for cold, warm in zip(rates["cold"], rates["warm"], strict=True)]
    medians = {kind: 1000 * statistics.median(found) for kind, found in waits.items()}
    print(json.dumps({
        "work": "cold",
        "on_disk": args.on_disk,
        "on_device": args.on_device,
        "adapter_mb": round(file_bytes(adapters[:1]) / 1e6, 2),
        "others_tokens_per_s": round(statistics.median(rates["warm"]), 1),
        "others_beside_cold": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "first_token_ms": {kind: round(median, 1) for kind, median in medians.items()},
        "read_ms": round(1000 * read_s, 2),
    }))  # fmt: skip


async def probed(
    llm: AsyncLLM, streams: Sequence[LoRARequest], probes: Sequence[LoRARequest]
) -> tuple[float, list[float]]:
    """Returns the tokens/s of streams beside probes, and the seconds that each probe takes."""
    counts = [0] * len(streams)
    running = [
        asyncio.create_task(stream_tokens(llm, adapter, counts, at))
        for at, adapter in enumerate(streams)
    ]
    await asyncio.sleep(0.5)
    began, first = time.perf_counter(), sum(counts)
    waits = []
    for at, adapter in enumerate(probes):
        await asyncio.sleep(max(0.0, began + at / PROBES_A_S - time.perf_counter()))
        waits.append(asyncio.create_task(first_token_s(llm, adapter)))
    found = list(await asyncio.gather(*waits))
    await asyncio.sleep(max(0.0, began + PROBED_S - time.perf_counter()))
    rate = (sum(counts) - first) / (time.perf_counter() - began)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return rate, found


async def stream_tokens(llm: AsyncLLM, adapter: LoRARequest, counts: list[int], at: int) -> None:
    """Counts the tokens of one stream after another, until it is cancelled."""
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    while True:
        seen = 0
        prompt = [at + 5, 8, 13, 21]
        async for output in llm.generate(prompt, params, lora_request=adapter):
            now = len(output.outputs[0].token_ids)
            counts[at] += now - seen
            seen = now


async def first_token_s(llm: AsyncLLM, adapter: LoRARequest) -> float:
    """Returns the seconds that a request of one token takes."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    async for output in llm.generate([5, 6, 7, 8], params, lora_request=adapter):
        if output.error:
            raise SystemExit(output.error)
    return time.perf_counter() - began


def seconds_to_read(path: Path) -> float:
    began = time.perf_counter()
    for file in path.iterdir():
        file.read_bytes()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
