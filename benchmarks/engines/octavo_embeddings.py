"""Octavo's embeddings of texts, in int8 or in float32."""

import sys

import numpy as np
from texts_work import arguments, measure

from octavo import LLM

model, texts, out, threads = arguments()
form = {"dtype": "float32"} if sys.argv[5] == "float32" else {"quantization": "int8"}
llm = LLM(model, threads=threads, report=lambda text: None, **form)


def embed(some: list[str]) -> np.ndarray:
    outputs = llm.embed(some, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs])


measure(embed, texts, out)
