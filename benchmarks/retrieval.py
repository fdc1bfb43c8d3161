"""Retrieval of facts planted in a long text, by type of KV cache.

    python benchmarks/retrieval.py --model smollm2 --kv-cache-dtype bf16 int8 k8v4 int4

Each document has --tokens tokens of Newton's Opticks and --facts sentences at even distances, such
as "The number of Lisbon is 48213." It ends with the beginning of one of them, and the model is to
continue it with the number. Weights are computed in fp32. Prints a JSON line per type: how many
greedy answers are right, the mean logprob of the right answers, and which facts were missed (by
document and depth).
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo import LLM, SamplingParams

TEXT = Path(__file__).parent.parent / "tests" / "data" / "opticks.txt"
CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Athens", "Dublin", "Vienna", "Prague", "Havana"),
    *("Tokyo", "Seoul", "Delhi", "Hanoi", "Warsaw", "Tunis", "Riga", "Sofia", "Bern", "Madrid"),
)


@dataclass(frozen=True)
class Question:
    document: int
    depth: int
    """Number of facts before the one that is asked for."""
    prompt: list[int]
    answer: list[int]


def questions(llm: LLM, args: argparse.Namespace) -> Iterator[Question]:
    """Yields the questions of all documents. Those of one document have a common prefix."""
    encode = llm.get_tokenizer().encode
    text = encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    for document in range(args.documents):
        draw = random.Random(document)
        cities = draw.sample(CITIES, args.facts)
        numbers = [str(draw.randrange(10_000, 100_000)) for _ in cities]
        part, at = args.tokens // args.facts, draw.randrange(len(text) - args.tokens)
        tokens = encode("")
        for index, (city, number) in enumerate(zip(cities, numbers, strict=True)):
            start = at + index * part
            fact = f"\n\nThe number of {city} is {number}.\n\n"
            tokens += text[start : start + part // 2]
            tokens += encode(fact, add_special_tokens=False)
            tokens += text[start + part // 2 : start + part]
        for depth, (city, number) in enumerate(zip(cities, numbers, strict=True)):
            prompt = encode(f"\n\nThe number of {city} is", add_special_tokens=False)
            answer = encode(f" {number}", add_special_tokens=False)
            yield Question(document, depth, [*tokens, *prompt], answer)


def measure(args: argparse.Namespace, kv: str) -> dict[str, object]:
    missed, total, count, right = [], 0.0, 0, 0
    with LLM(
        args.model,
        dtype="float32",
        kv_cache_dtype=kv,
        max_model_len=args.tokens + 40 * args.facts,
        max_num_seqs=1,
        report=lambda text: None,
    ) as llm:
        for asked in questions(llm, args):
            params = SamplingParams(temperature=0, max_tokens=len(asked.answer))
            (found,) = llm.generate(asked.prompt, params, use_tqdm=False)
            if found.outputs[0].token_ids == asked.answer:
                right += 1
            else:
                missed.append((asked.document, asked.depth))
            scored = SamplingParams(
                max_tokens=1, prompt_logprobs=0, prompt_logprob_start=len(asked.prompt)
            )
            (output,) = llm.generate(asked.prompt + asked.answer, scored, use_tqdm=False)
            for token_id, logprobs in zip(
                asked.answer, (output.prompt_logprobs or [])[-len(asked.answer) :], strict=True
            ):
                assert logprobs is not None
                total += logprobs[token_id].logprob
                count += 1
    row: dict[str, object] = {"kv": kv, "tokens": args.tokens, "right": right}
    row |= {"questions": args.documents * args.facts, "mean_logprob": round(total / count, 4)}
    return row | {"missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["bf16", "int8", "k8v4", "int4"])
    parser.add_argument("--tokens", type=int, default=7800, help="of the text, per document")
    parser.add_argument("--facts", type=int, default=8, help=f"per document, up to {len(CITIES)}")
    parser.add_argument("--documents", type=int, default=4)
    args = parser.parse_args()
    for kv in args.kv_cache_dtype:
        print(json.dumps(measure(args, kv)), flush=True)


if __name__ == "__main__":
    main()
