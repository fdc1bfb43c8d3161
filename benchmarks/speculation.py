"""What guessing tokens gains: tokens/s of works that repeat their prompt more or less, with each
`spec_method` and without, in turns.

    python benchmarks/speculation.py --model smollm2 --text FILE --rounds 5 --streams 1

Every work is greedy and of a fixed length, with its prompt in the prefix cache. All methods must
give the same tokens, or the run ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput

METHODS = ("none", "ngram", "suffix")
QUOTED = 1500
"""Characters of the text that a work quotes."""


def works(text: str) -> dict[str, str]:
    """Returns what each work asks."""
    part = text[3000 : 3000 + QUOTED]
    return {
        "copy edit": f"Repeat this text word for word, without its numbers:\n\n{part}",
        "extraction": f"Quote every sentence of this text that mentions light:\n\n{part}",
        "chat": "Write a story about a lighthouse keeper and his dog.",
    }


def build(model: str, method: str, spec_model: str | None) -> LLM:
    spec = {} if method == "none" else {"spec_method": method}
    if method == "draft_model":
        spec["spec_model"] = str(spec_model)
    return LLM(model=model, report=lambda text: None, **spec)


def timed(
    llm: LLM, question: str, num_streams: int, num_tokens: int
) -> tuple[float, list[RequestOutput]]:
    """Returns tokens/s of so many streams of one question, and their outputs."""
    chats = [[{"role": "user", "content": f"{question} ({index})"}] for index in range(num_streams)]
    llm.chat(chats, SamplingParams(temperature=0, max_tokens=1))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.chat(chats, params)
    return num_streams * num_tokens / (time.perf_counter() - began), outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--text", type=Path, required=True, help="a text of 5,000 characters or more"
    )
    parser.add_argument("--spec-model", help="a draft model, to be measured too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    methods = [*METHODS, "draft_model"] if args.spec_model else METHODS
    engines = {method: build(args.model, method, args.spec_model) for method in methods}
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for work, question in works(args.text.read_text()).items():
            answers = {}
            for method, llm in engines.items():
                rate, outputs = timed(llm, question, args.streams, args.tokens)
                rates.setdefault((work, method), []).append(rate)
                answers[method] = [list(output.outputs[0].token_ids) for output in outputs]
            if any(answer != answers["none"] for answer in answers.values()):
                raise SystemExit(f"{work}: the methods gave different tokens")
    for (work, method), found in rates.items():
        ratios = [one / plain for one, plain in zip(found, rates[work, "none"], strict=True)]
        print(
            f"{work:10} {method:11} {statistics.median(found):7.1f} tokens/s,"
            f" {statistics.median(ratios):.2f} times none ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    for method, llm in engines.items():
        stats = llm.get_metrics()
        print(f"{method}: {stats.num_draft_tokens} guessed, {stats.num_accepted_tokens} held")


if __name__ == "__main__":
    main()
