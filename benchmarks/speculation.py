"""What guessing tokens gains: tokens/s of works that repeat their prompt more or less, with each
`spec_method` and without, in turns.

    python benchmarks/speculation.py [--model smollm2] [--rounds 5] [--streams 1,8,32]
    python benchmarks/speculation.py --temperature 1 --methods none,suffix,wrong
    python benchmarks/speculation.py --methods none,suffix --llamacpp PYTHON_WITH_XLLAMACPP
    python benchmarks/speculation.py --methods none,suffix --llama-server PATH_OF_LLAMA_SERVER
    python benchmarks/speculation.py --methods none,suffix --vllm PYTHON_WITH_VLLM --vllm-model DIR

Works are chats over a short text and a piece of code, such as a model of 135M parameters can do;
answers end where the model ends them. `wrong` is a proposer whose every guess fails. All methods
must give the same tokens, or the run ends. `none` is measured beside itself too (`again`), for the
noise, and their order turns from round to round. With --llamacpp or --llama-server each of
llama.cpp's `--spec-type`s that needs no other model gets the same token ids, one stream, greedy;
with --llamacpp-draft it drafts with that model, as Octavo does with --spec-model. vLLM gets them
with its `ngram` and without. Prints a JSON line for each work, method and number of streams:
medians of the rounds, and of their ratios to `none`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import machine
from engines.llama_server_speculation import LlamaServer

from octavo import LLM, SamplingParams
from octavo.checkpoint.catalogue import resolve
from octavo.engine.speculation import speculation
from octavo.engine.speculation.proposer import Draft

TEXT = """\
The lighthouse stood at the end of a long road. Every evening the keeper walked up the \
stairs, lit the lamp and looked out over the sea. He had a dog called Finn, who slept by \
the stove in winter and chased gulls in summer. In March a storm broke two of the \
windows, and for three days no boat could land. When the storm was over, the keeper \
repaired the windows, painted the door, and wrote a long letter to his sister in the \
town. She answered within a week, and sent him a box of books, a new lamp and a blanket \
for the dog."""
MISTAKES = {"evening": "evning", "letter": "leter", "answered": "anwsered"}
CODE = '''\
def mean(numbers):
    """Returns the mean of some numbers."""
    total = 0
    for number in numbers:
        total = total + number
    return total / len(numbers)


def variance(numbers):
    """Returns the variance of some numbers."""
    center = mean(numbers)
    total = 0
    for number in numbers:
        total = total + (number - center) ** 2
    return total / len(numbers)
'''
PEER = Path(__file__).parent / "engines" / "xllamacpp_speculation.py"


class WrongProposer:
    """Guesses a token that never comes: the answers have none of these works' words."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes nothing in."""

    def propose(self, max_tokens: int) -> Draft:
        """Returns a guess that looks as good as a long match."""
        return Draft([WRONG_ID] * max_tokens, 16)


WRONG_ID = 3
"""Id of a special token of SmolLM2's vocabulary, which it never writes."""


def works(text: str = TEXT, code: str = CODE) -> dict[str, str]:
    """Returns what each work asks; a small model can do these."""
    wrong = text
    for word, mistake in MISTAKES.items():
        wrong = wrong.replace(word, mistake)
    block = f"```python\n{code}```"
    return {
        "copy edit": "Correct the spelling mistakes in this text, and change nothing else:\n\n"
        + wrong,
        "extraction": f"Which sentences of this text are about the dog? Quote them.\n\n{text}",
        "code edit": f"Rename mean to average in this code. Write the whole code.\n\n{block}",
        "summary": f"Summarize this text in two sentences.\n\n{text}",
        "chat": "Write a story about a lighthouse keeper and his dog.",
    }


def build(args: argparse.Namespace, method: str) -> LLM:
    """Makes an engine that guesses by a method."""
    options: dict[str, Any] = {"model": args.model, "report": lambda text: None}
    given = json.loads(args.options)
    guesses = method not in ("none", "again")
    options |= {name: given[name] for name in given if guesses or not name.startswith("spec_")}
    if guesses:
        options["spec_method"] = "ngram" if method == "wrong" else method
    if method in ("draft_model", "eagle3"):
        options["spec_model"] = args.spec_model
    if method != "wrong":
        return LLM(**options)
    known = dict(speculation.PROPOSERS)
    vars(speculation)["PROPOSERS"] = known | {"ngram": WrongProposer}
    try:
        return LLM(**options)
    finally:
        vars(speculation)["PROPOSERS"] = known


def prompts_of(llm: LLM, question: str, num_streams: int) -> list[list[int]]:
    """Returns a chat's token ids for each stream, which differ in their last word."""
    chats = [
        [{"role": "user", "content": f"{question} ({index})" if index else question}]
        for index in range(num_streams)
    ]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return [output.prompt_token_ids for output in outputs]


def answered(
    llm: LLM, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[float, list[list[int]]]:
    """Returns tokens/s of all streams, their prompts cached, and the answers."""
    params = [
        SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seed=index)
        for index in range(len(prompts))
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - began
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, answers)) / elapsed_s, answers


def measure(args: argparse.Namespace) -> dict[str, list[int]]:
    """Prints the figures of all methods; returns the prompt of each work."""
    methods = list(dict.fromkeys(["none", *args.methods.split(",")]))
    engines = {method: build(args, method) for method in methods}
    questions = works()
    chosen = args.works.split(",") if args.works else list(questions)
    first: dict[str, list[int]] = {}
    for num_streams in map(int, args.streams.split(",")):
        for work in chosen:
            prompts = {}
            for method, llm in engines.items():
                prompts[method] = prompts_of(llm, questions[work], num_streams)
            first.setdefault(work, prompts["none"][0])
            rates: dict[str, list[float]] = {method: [] for method in methods}
            counts = {method: drafts_of(llm) for method, llm in engines.items()}
            for number in range(args.rounds):
                answers = {}
                # The order turns, so that no method always follows the same one.
                first_at = number % len(methods)
                for method in methods[first_at:] + methods[:first_at]:
                    rate, answers[method] = answered(engines[method], prompts[method], args)
                    rates[method].append(rate)
                if any(answer != answers["none"] for answer in answers.values()):
                    raise SystemExit(f"{work}: the methods gave different tokens")
            for method, llm in engines.items():
                drafted, held = (
                    now - before for now, before in zip(drafts_of(llm), counts[method], strict=True)
                )
                row = {"work": work, "streams": num_streams, "method": method}
                row |= figures(rates[method], rates["none"])
                num_tokens = args.rounds * sum(map(len, answers[method]))
                row |= {"drafted": drafted, "held": held, "tokens": num_tokens}
                print(json.dumps(row), flush=True)
    return first


def figures(rates: list[float], plain: list[float]) -> dict[str, Any]:
    """Returns medians of rates and of their ratios."""
    ratios = [one / other for one, other in zip(rates, plain, strict=True)]
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def drafts_of(llm: LLM) -> tuple[int, int]:
    """Returns how many tokens an engine has guessed so far, and how many held."""
    stats = llm.get_metrics()
    return stats.num_draft_tokens, stats.num_accepted_tokens


def measure_llama_server(args: argparse.Namespace, prompts: dict[str, list[int]]) -> None:
    """Prints what llama.cpp's server makes of the same prompts, by its kinds of guesses."""
    model = args.llamacpp_model or str(resolve(args.model))
    server = LlamaServer(args.llama_server, model, args.llamacpp_draft)
    for row in server.rows(prompts, args.tokens, args.rounds):
        print(json.dumps(row), flush=True)


def measure_vllm(args: argparse.Namespace, prompts: dict[str, list[int]]) -> None:
    """Prints what vLLM makes of the same prompts, without guesses and with its `ngram`."""
    for kind in ("none", "ngram"):
        job = {"model": args.vllm_model, "kind": kind, "options": json.loads(args.vllm_options)}
        job |= {"prompts": prompts, "tokens": args.tokens, "rounds": args.rounds}
        ended = subprocess.run(
            [args.vllm, str(PEER.with_name("vllm_speculation.py"))],
            input=json.dumps(job),
            text=True,
            stdout=subprocess.PIPE,
            check=True,
        )
        # Its own lines of log come on standard output too.
        for line in ended.stdout.splitlines():
            if line.startswith("RESULT "):
                print(line.removeprefix("RESULT "), flush=True)


def measure_llamacpp(args: argparse.Namespace, prompts: dict[str, list[int]]) -> None:
    """Prints what the package xllamacpp makes of the same prompts, by its kinds of guesses."""
    job = {
        "model": args.llamacpp_model or str(resolve(args.model)),
        "draft": args.llamacpp_draft,
        "prompts": prompts,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "threads": len(os.sched_getaffinity(0)),
    }
    command = [args.llamacpp, str(PEER)]
    ended = subprocess.run(
        command, input=json.dumps(job), text=True, stdout=subprocess.PIPE, check=True
    )
    sys.stdout.write(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--options", default="{}", help="JSON of the engines' options; spec_... where they guess"
    )
    parser.add_argument("--works", help="names of works, with commas; default all")
    parser.add_argument("--methods", default="again,ngram,suffix,wrong")
    parser.add_argument("--spec-model", help="for draft_model and eagle3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1", help="numbers of streams, with commas")
    parser.add_argument("--tokens", type=int, default=256, help="maximum number of output tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--llamacpp", help="a Python that has the package xllamacpp")
    parser.add_argument("--llama-server", help="llama.cpp's own server")
    parser.add_argument("--vllm", help="a Python that has vLLM's CPU build")
    parser.add_argument("--vllm-model", help="directory of the same checkpoint for it")
    parser.add_argument("--vllm-options", default="{}", help="JSON of more of its options")
    parser.add_argument("--llamacpp-model", help="GGUF file for it; default the same")
    parser.add_argument("--llamacpp-draft", help="GGUF file of a draft model for it")
    args = parser.parse_args()
    shown = {name: str(value) for name, value in vars(args).items() if value is not None}
    print(json.dumps({"machine": machine(), "load": os.getloadavg(), **shown}), flush=True)
    prompts = measure(args)
    if args.llamacpp:
        measure_llamacpp(args, prompts)
    if args.llama_server:
        measure_llama_server(args, prompts)
    if args.vllm:
        measure_vllm(args, prompts)


if __name__ == "__main__":
    main()
