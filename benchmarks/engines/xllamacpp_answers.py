"""Greedy answers of llama.cpp, through the package xllamacpp, to prompts of token ids: a GGUF file
and the number of tokens are arguments, a JSON list of prompts comes on standard input, the lists of
ids go to standard output behind `ANSWERS `.
"""

import json
import os
import sys

import xllamacpp

model, num_tokens = sys.argv[1], int(sys.argv[2])
prompts = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx = 2048
params.cpuparams.n_threads = os.cpu_count() or 1
params.warmup = False
server = xllamacpp.Server(params)
answers = []
for ids in prompts:
    body = {"prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.handle_completions(body | {"logprobs": 1, "cache_prompt": False})
    listed = (answer["choices"][0].get("logprobs") or {}).get("content")
    if not listed:
        raise SystemExit(f"llama.cpp listed no tokens: {json.dumps(answer)[:400]}")
    answers.append([each["id"] for each in listed])
print("ANSWERS " + json.dumps(answers))
