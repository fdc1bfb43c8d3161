"""Whether other engines say what Octavo says from the same quantised files: greedy tokens, equal up
to the first place where Octavo's two likeliest tokens lie closer than a bound.

    octavo quantize smollm2 --method gptq --format gptq --group 32 --calibration TEXT -o DIR/gptq
    python benchmarks/agreement.py --vllm PYTHON_WITH_VLLM DIR/gptq DIR/awq DIR/w4a16 DIR/w8a8
    python benchmarks/agreement.py --llamacpp PYTHON_WITH_XLLAMACPP DIR/q4_k

Prints a JSON line per model: the tokens compared, and for each prompt that parts where it does and
by how much Octavo's two likeliest differ there. Ends with 1 where they differ by more than the
bound. A model takes less than a minute, vLLM's start included. With `--dtype float32` Octavo
computes with the files' own numbers; otherwise it rounds rows to 8 bits beside integer codes, which
moves SmolLM2's logprobs by 0.08 in the mean.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from octavo import LLM, SamplingParams

ENGINES = Path(__file__).parent / "engines"
PROMPTS = (
    "The sun is a star, and the light that it sends",
    "A short history of the printed book begins",
    "To cook rice, one needs",
    "In mathematics, a prime number is",
    "The capital of France",
    "Once upon a time, in a small village by the sea,",
    "Water boils when",
    "The three laws of motion say that",
)
NUM_TOKENS = 32


def own_answers(
    model: str, dtype: str
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Returns prompts as ids, the answers, and at each token how far the two likeliest differ."""
    with LLM(model, dtype=dtype, report=lambda text: None, enable_prefix_caching=False) as llm:
        prompts = [llm.get_tokenizer().encode(text) for text in PROMPTS]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers, gaps = [], []
    for each in done:
        sample = each.outputs[0]
        assert sample.logprobs is not None
        tops = [
            sorted((one.logprob for one in step.values()), reverse=True) for step in sample.logprobs
        ]
        answers.append(list(sample.token_ids))
        gaps.append([top[0] - top[1] for top in tops])
    return prompts, answers, gaps


def others_answers(
    python: str, script: str, model: str, prompts: list[list[int]]
) -> list[list[int]]:
    done = subprocess.run(
        [python, str(ENGINES / script), model, str(NUM_TOKENS)],
        input=json.dumps(prompts),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    if done.returncode or not lines:
        raise SystemExit(f"{script} failed on {model}:\n{done.stderr[-3000:]}")
    answers: list[list[int]] = json.loads(lines[-1].removeprefix("ANSWERS "))
    return answers


def compared(model: str, python: str, script: str, dtype: str, bound: float) -> bool:
    """Compares one model's answers, prints what was found, and returns whether they agree."""
    prompts, own, gaps = own_answers(model, dtype)
    others = others_answers(python, script, model, prompts)
    same, parted = 0, []
    for mine, theirs, gap in zip(own, others, gaps, strict=True):
        pairs = zip(mine, theirs, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        same += NUM_TOKENS if place is None else place
        if place is not None:
            parted.append({"token": place, "apart": round(gap[place], 4)})
    agrees = all(each["apart"] < bound for each in parted)
    row = {"model": model, "with": script, "dtype": dtype, "same": same}
    row |= {"of": NUM_TOKENS * len(prompts)}
    print(json.dumps(row | {"parted": parted, "agrees": agrees}), flush=True)
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--llamacpp", help="a Python that has the package xllamacpp")
    parser.add_argument("--bound", type=float, default=0.1)
    parser.add_argument(
        "--dtype",
        default="auto",
        help="float32 compares the files' numbers; auto runs the codes, whose rows native rounds",
    )
    args = parser.parse_args()
    peers = {"vllm_answers.py": args.vllm, "xllamacpp_answers.py": args.llamacpp}
    found = [
        compared(model, python, script, args.dtype, args.bound)
        for model in args.models
        for script, python in peers.items()
        if python is not None
    ]
    if not found:
        parser.error("name a peer: --vllm or --llamacpp")
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
