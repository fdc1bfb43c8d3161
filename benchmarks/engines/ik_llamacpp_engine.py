"""ik_llama.cpp on the standard work, through the C functions that the package ik-llama-cpp-python
names. MODEL is a GGUF file; options: JSON of fields of its llama_model_params and
llama_context_params, e.g. {"flash_attn": true, "repack_tensors": true}.

The wheel is built for AVX2, without AVX-512; IK_LLAMA_CPP_LIB_PATH names the libllama.so of another
build.
"""

import json
import os

import ik_llama_cpp._ctypes_api as api
import numpy as np
from work import arguments, measure

BATCH_TOKENS = 2048


class Engine:
    def __init__(
        self, path: str, requests: int, context_tokens: int, options: dict[str, object]
    ) -> None:
        api.llama_backend_init()
        model_params, params = api.llama_model_default_params(), api.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = 512
        params.n_seq_max = requests
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        known = [{name for name, _ in part._fields_} for part in (model_params, params)]
        for name, value in options.items():
            if not any(name in names for names in known):
                raise SystemExit(f"{name}: no field of llama_model_params or llama_context_params")
            for part, names in zip((model_params, params), known, strict=True):
                if name in names:
                    setattr(part, name, value)
        self.model = api.llama_model_load_from_file(path.encode(), model_params)
        self.num_tokens = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"{path} was not loaded")
        self.batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, prompts: list[list[int]], num_output: int) -> int:
        api.llama_kv_cache_clear(self.context)
        drawn: list[int] = []
        at_once = BATCH_TOKENS // len(prompts[0])
        for first in range(0, len(prompts), at_once):
            part = prompts[first : first + at_once]
            rows = [
                (token, place, first + i, place == len(ids) - 1)
                for i, ids in enumerate(part)
                for place, token in enumerate(ids)
            ]
            drawn += self._decode(rows)
        for step in range(num_output - 1):
            drawn = self._decode(
                [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(drawn)]
            )
        return len(drawn) * num_output

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes rows of (token, position, sequence, whether to draw after it); returns the
        greedy tokens drawn.
        """
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, draws) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := api.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode gave {status}")
        places = [i for i, row in enumerate(rows) if row[3]]
        return [
            int(
                np.ctypeslib.as_array(
                    api.llama_get_logits_ith(self.context, i), (self.num_tokens,)
                ).argmax()
            )
            for i in places
        ]


def main() -> None:
    model, requests, prompt, output, options = arguments()
    engine = Engine(model, requests, requests * (prompt + output), json.loads(options))
    measure(engine.run, requests, prompt, output)


main()
