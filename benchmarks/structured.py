"""Throughput of answers that have a form, against the same requests without one.

    python benchmarks/structured.py [--model smollm2] [--rounds 5] [--tokens 96]

Every request has a schema of its own, with an array that is longer than its answer, so that both
sides compute as many tokens. Rounds with and without a form take turns. Prints one JSON line for
each case (a batch of 32 greedy, at T = 1 and with top_p 0.9; one stream greedy and at T = 1): the
medians of tokens per second, and their ratio. The last line is what a schema that was never seen
adds to the time to the first token, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from octavo import LLM, SamplingParams, StructuredOutputs

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "32 greedy": (32, {"temperature": 0}),
    "32 T=1": (32, {}),
    "32 top_p": (32, {"top_p": 0.9}),
    "1 greedy": (1, {"temperature": 0}),
    "1 T=1": (1, {}),
}


def schema(number: int) -> dict[str, Any]:
    """Returns a schema with names of its own."""
    names = [f"name{number}", f"age{number}", f"notes{number}"]
    kinds = [
        {"type": "string", "maxLength": 20},
        {"type": "integer"},
        {"type": "array", "items": {"type": "string"}, "minItems": 100},
    ]
    return {
        "type": "object",
        "properties": dict(zip(names, kinds, strict=True)),
        "required": names,
        "additionalProperties": False,
    }


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
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def first_token_s(llm: LLM, form: StructuredOutputs | None) -> float:
    """Returns the seconds until the one token of a request is there."""
    params = SamplingParams(max_tokens=1, temperature=0, structured_outputs=form)
    began = time.perf_counter()
    llm.generate("A JSON object:", params, use_tqdm=False)
    return time.perf_counter() - began


def added_ms(llm: LLM, num: int) -> dict[str, float]:
    """Returns what schemas that were never seen add to the time to the first token."""
    forms = [StructuredOutputs(json=schema(1000 + i)) for i in range(num)]
    added = sorted(1e3 * (first_token_s(llm, form) - first_token_s(llm, None)) for form in forms)
    return {"median_ms": round(statistics.median(added), 2), "p99_ms": round(added[-1], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    llm = LLM(given.model, max_model_len=2048, report=lambda text: None)
    for name, (num, options) in CASES.items():
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(given.rounds):
            for formed, found in rates.items():
                found.append(rate(llm, num, given.tokens, formed=formed, **options))
        formed, plain = (statistics.median(rates[formed]) for formed in (True, False))
        line = {"case": name, "form": formed, "none": plain, "ratio": formed / plain}
        print(
            json.dumps({key: one if key == "case" else round(one, 3) for key, one in line.items()})
        )
    print(json.dumps({"case": "a new schema"} | added_ms(llm, 100)))


if __name__ == "__main__":
    main()
