"""Speed and memory of answers that have a form, against the same requests without one.

    python benchmarks/structured.py [--model smollm2] [--rounds 5] [--tokens 96] [--schemas 100]
    python benchmarks/structured.py --cases "32 T=1" "32 top_p"
    python benchmarks/structured.py --guessing

Every request of a batch has a schema of its own, which only the first round has not seen. Rounds
with and without a form take turns. Prints one JSON line for each of these, the medians of rounds:

- throughput of a batch of 32 greedy, at T = 1 and with top_p 0.9, and of one stream greedy and at
  T = 1, and their ratio: the schemas have an array that is longer than an answer, so that both
  sides compute as many tokens;
- throughput of one stream whose schemas have long keys, without guesses (`spec_method` none) and as
  it is, with forced text guessed, against as many tokens without a form;
- milliseconds that a schema which was never seen adds to the time to the first token;
- the 99th percentile of the time between tokens of 8 streams while such schemas come ten a second,
  against as many requests without a form;
- bytes of a running answer beside its compiled grammar, and of all the compiled ones that a worker
  keeps.

With `--cases` only these cases of the throughput are measured. With `--guessing` only what guessing
forced text gives and costs: an engine as it is against one without guesses, round by round in
turns, with long keys, with the schemas above and without a form, in one stream and in several.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from octavo.config.engine_config import EngineConfig
from octavo.text.grammar.lazy import LazyGrammars
from octavo.wiring.grammars import lazy_grammars
from octavo.wiring.model import build_tokenizer, open_model
from octavo.worker.sampling.grammar_matchers import CompiledGrammars

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "32 greedy": (32, {"temperature": 0}),
    "32 T=1": (32, {}),
    "32 top_p": (32, {"top_p": 0.9}),
    "1 greedy": (1, {"temperature": 0}),
    "1 T=1": (1, {}),
}
NUM_STREAMS = 8
ARRIVALS_A_S = 10
"""Rate of requests with schemas never seen beside the streams."""


def schema(number: int) -> dict[str, Any]:
    """Returns a schema with names of its own, whose answers do not end soon."""
    names = [f"name{number}", f"age{number}", f"notes{number}"]
    kinds = [
        {"type": "string", "maxLength": 20},
        {"type": "integer"},
        {"type": "array", "items": {"type": "string"}, "minItems": 100},
    ]
    return closed_object(dict(zip(names, kinds, strict=True)))


def long_keys(number: int) -> dict[str, Any]:
    """Returns a schema of which most of an answer is forced."""
    names = [
        f"measurement_number_{number}_of_the_{nth}_sensor_in_degrees_celsius"
        for nth in ("first", "second", "third", "fourth")
    ]
    number_kind = {"type": "integer", "minimum": 0, "maximum": 99}
    return closed_object(dict.fromkeys(names, number_kind))


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# -- throughput ------------------------------------------------------------------------------------


def rate(llm: LLM, num: int, tokens: int, *, formed: bool, **options: Any) -> float:
    """Returns tokens per second of `num` requests at once."""
    prompts = [f"A JSON object about person {i}, with many notes:" for i in range(num)]
    params = [
        SamplingParams(
            max_tokens=tokens,
            seed=i,
            structured_outputs=StructuredOutputs(json=schema(i)) if formed else None,
            ignore_eos=not formed,
            **options,
        )
        for i in range(num)
    ]
    return timed(llm, prompts, params)


def timed(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> float:
    """Returns tokens per second of some requests."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def forced_rates(llm: LLM, number: int) -> tuple[float, float]:
    """Returns tokens per second of an answer whose keys are forced, and of as many free tokens."""
    form = StructuredOutputs(json=long_keys(number), disable_any_whitespace=True)
    prompt = "A JSON object of measurements:"
    wanted = SamplingParams(temperature=0, max_tokens=400, structured_outputs=form)
    began = time.perf_counter()
    (output,) = llm.generate([prompt], wanted, use_tqdm=False)
    num_tokens = len(output.outputs[0].token_ids)
    formed = num_tokens / (time.perf_counter() - began)
    free = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return formed, timed(llm, [prompt], [free])


def ratio_line(case: str, formed: list[float], plain: list[float]) -> dict[str, Any]:
    with_form, without = statistics.median(formed), statistics.median(plain)
    return {
        "case": case,
        "form": round(with_form, 3),
        "none": round(without, 3),
        "ratio": round(with_form / without, 3),
    }


def throughput(
    llm: LLM, num_rounds: int, tokens: int, names: Iterable[str] = CASES
) -> Iterable[dict[str, Any]]:
    """Yields a line for each case."""
    for name in names:
        num, options = CASES[name]
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(num_rounds):
            for formed, found in rates.items():
                found.append(rate(llm, num, tokens, formed=formed, **options))
        yield ratio_line(name, rates[True], rates[False])


def long_forced_keys(model: str, num_rounds: int) -> Iterable[dict[str, Any]]:
    """Yields a line for an engine as it is, and for one that guesses forced text."""
    for case, options in (
        ("1 long keys", {"spec_method": "none"}),
        ("1 long keys, guessed", {}),
    ):
        llm = LLM(model, max_model_len=2048, report=lambda text: None, **options)
        forced_rates(llm, 0)
        found = [forced_rates(llm, 1 + number) for number in range(num_rounds)]
        yield ratio_line(case, [formed for formed, _ in found], [plain for _, plain in found])
        llm.close()


# -- what guesses give and cost --------------------------------------------------------------------

KINDS = ("long keys", "schemas", "no form")
FEW_STREAMS = (1, 4, 32)


def rate_of(llm: LLM, kind: str, num: int, tokens: int) -> float:
    """Returns tokens per second of `num` greedy requests of a kind."""
    if kind != "long keys":
        return rate(llm, num, tokens, formed=kind == "schemas", temperature=0)
    prompts = [f"A JSON object of measurements by {i}:" for i in range(num)]
    forms = [StructuredOutputs(json=long_keys(i), disable_any_whitespace=True) for i in range(num)]
    params = [
        SamplingParams(temperature=0, max_tokens=400, structured_outputs=form) for form in forms
    ]
    return timed(llm, prompts, params)


def guessing(model: str, num_rounds: int, tokens: int) -> Iterable[dict[str, Any]]:
    """Yields a line for each kind of request and number of streams."""
    engines = {
        method: LLM(model, max_model_len=2048, spec_method=method, report=lambda text: None)
        for method in (None, "none")
    }
    for kind in KINDS:
        for num in FEW_STREAMS:
            rates: dict[str | None, list[float]] = {method: [] for method in engines}
            for number in range(num_rounds + 1):
                for method, llm in engines.items():
                    found = rate_of(llm, kind, num, tokens)
                    if number > 0:  # the first round compiles, and measures steps
                        rates[method].append(found)
            guessed, plain = (statistics.median(rates[method]) for method in (None, "none"))
            yield {
                "case": f"{num} {kind}",
                "guessed": round(guessed, 1),
                "none": round(plain, 1),
                "ratio": round(guessed / plain, 3),
                "ratios of rounds": [
                    round(one / other, 3)
                    for one, other in zip(rates[None], rates["none"], strict=True)
                ],
            }
    for llm in engines.values():
        llm.close()


# -- what a new schema costs -----------------------------------------------------------------------


def first_token_s(llm: LLM, form: StructuredOutputs | None) -> float:
    """Returns the seconds until the one token of a request is there."""
    params = SamplingParams(max_tokens=1, temperature=0, structured_outputs=form)
    began = time.perf_counter()
    llm.generate("A JSON object:", params, use_tqdm=False)
    return time.perf_counter() - began


def added_ms(llm: LLM, num: int) -> dict[str, float]:
    """Returns what schemas that were never seen add to the time to the first token."""
    forms = [StructuredOutputs(json=schema(1000 + i)) for i in range(num)]
    added = [1e3 * (first_token_s(llm, form) - first_token_s(llm, None)) for form in forms]
    return {"median_ms": round(statistics.median(added), 2), "p99_ms": round(high(added), 2)}


def high(values: list[float]) -> float:
    """Returns the 99th of a hundred values, or the largest of fewer."""
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)]


async def gaps_ms(llm: AsyncLLM, num: int, tokens: int, *, formed: bool, first: int) -> float:
    """Returns the 99th percentile of the time between tokens of streams, beside requests for one
    token each of which `formed` ones have schemas that were never seen.
    """
    gaps: list[float] = []

    async def stream(index: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        last = None
        async for _ in llm.generate(f"Story {index}:", params):
            now = time.perf_counter()
            if last is not None:
                gaps.append(1e3 * (now - last))
            last = now

    async def arrive() -> None:
        for number in range(num):
            form = StructuredOutputs(json=schema(first + number)) if formed else None
            params = SamplingParams(max_tokens=1, temperature=0, structured_outputs=form)
            async for _ in llm.generate("A JSON object:", params):
                pass
            await asyncio.sleep(1 / ARRIVALS_A_S)

    streams = [asyncio.create_task(stream(index)) for index in range(NUM_STREAMS)]
    arrivals = asyncio.create_task(arrive())
    await asyncio.gather(*streams)
    arrivals.cancel()
    return high(gaps)


async def others_p99(model: str, num_rounds: int, num: int, tokens: int) -> dict[str, Any]:
    """Returns the streams' percentiles with forms beside them and without."""
    llm = AsyncLLM.from_options(model=model, max_model_len=2048)
    await gaps_ms(llm, 1, 16, formed=True, first=5_000)
    found: dict[bool, list[float]] = {True: [], False: []}
    for index in range(num_rounds):
        for formed, gaps in found.items():
            first = 10_000 * (index + 1)
            gaps.append(await gaps_ms(llm, num, tokens, formed=formed, first=first))
    llm.close()
    return ratio_line("p99 between tokens of others, ms", found[True], found[False])


# -- memory ----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    gc.collect()
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def memory(grammars: LazyGrammars, tokens: list[int], num: int) -> dict[str, Any]:
    """Returns the memory of `num` answers of one schema after some tokens, and that of compiled
    grammars up to the worker's bound, as it is counted and as the process grows.
    """
    spec = grammars.admit(StructuredOutputs(json={"type": "array", "items": {"type": "string"}}))
    compiled = grammars.compile(spec)
    before = resident_bytes()
    matchers = [compiled.copy() for _ in range(num)]
    for matcher in matchers:
        matcher.take(tokens)
    a_row = (resident_bytes() - before) / num
    del matchers
    kept = CompiledGrammars(grammars)
    before = resident_bytes()
    for number in range(2 * num):
        kept.matcher(grammars.admit(StructuredOutputs(json=schema(number))))
    return {
        "case": "memory",
        "tokens of an answer": len(tokens),
        "bytes an answer": round(a_row),
        "compiled grammars": 2 * num,
        "bytes of the compiled": resident_bytes() - before,
    }


def memory_line(model: str, num: int) -> dict[str, Any]:
    opened = open_model(EngineConfig.from_options(model=model))
    tokenizer = build_tokenizer(opened)
    assert tokenizer is not None
    text = json.dumps(["Notes that are of no use to the others."] * 40)
    tokens = tokenizer.encode(text, add_special_tokens=False)[:500]
    return memory(lazy_grammars(opened, lambda: tokenizer), tokens, num)


def other_figures(llm: LLM, given: argparse.Namespace) -> None:
    """Prints what is measured beside the throughput; closes the engine."""
    print(json.dumps({"case": "a new schema"} | added_ms(llm, given.schemas)), flush=True)
    llm.close()
    for line in long_forced_keys(given.model, given.rounds):
        print(json.dumps(line), flush=True)
    beside = others_p99(given.model, given.rounds, given.schemas, 2 * given.tokens)
    print(json.dumps(asyncio.run(beside)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--schemas", type=int, default=100, help="schemas that were never seen")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="only these, and nothing else")
    parser.add_argument("--guessing", action="store_true", help="only what guesses give and cost")
    given = parser.parse_args()
    if given.guessing:
        for line in guessing(given.model, given.rounds, given.tokens):
            print(json.dumps(line), flush=True)
        return
    if given.cases is None:
        print(json.dumps(memory_line(given.model, given.schemas)), flush=True)
    llm = LLM(given.model, max_model_len=2048, report=lambda text: None)
    for line in throughput(llm, given.rounds, given.tokens, given.cases or CASES):
        print(json.dumps(line), flush=True)
    if given.cases is None:
        other_figures(llm, given)


if __name__ == "__main__":
    main()
