"""llama.cpp on the standard work, through the package xllamacpp, whose wheels hold it compiled.
MODEL is a GGUF file; options: JSON of {"mmap": whether the file is mapped rather than read,
"repack": whether weights are copied into another layout}, both true by default.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import xllamacpp
from work import arguments, measure

model, requests, prompt, output, text = arguments()
options = json.loads(text)
params = xllamacpp.CommonParams()
params.model.path = model
params.n_parallel = requests
params.n_ctx = requests * (prompt + output + 16)
params.kv_unified = True  # else each request gets 256 tokens at least
params.cache_ram_mib = 0
params.cpuparams.n_threads = os.cpu_count() or 1
params.warmup = False
params.load_mode = getattr(
    xllamacpp.llama_load_mode,
    "LLAMA_LOAD_MODE_MMAP" if options.get("mmap", True) else "LLAMA_LOAD_MODE_NONE",
)
params.no_extra_bufts = not options.get("repack", True)
server = xllamacpp.Server(params)


def run(prompts: list[list[int]], num_output: int) -> int:
    """Asks for all prompts at once; the server counts the tokens."""

    def one(ids: list[int]) -> int:
        body = {"prompt": ids, "max_tokens": num_output, "temperature": 0, "ignore_eos": True}
        answer = server.handle_completions(body | {"cache_prompt": False})
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return sum(pool.map(one, prompts))


measure(run, requests, prompt, output)
