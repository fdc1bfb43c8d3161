"""OpenVINO GenAI's continuous batching on the CPU on the standard work. MODEL is a directory of
OpenVINO IR, or a GGUF file with `general.file_type`; options: JSON of plugin properties, e.g.
{"INFERENCE_PRECISION_HINT": "bf16"}."""

import json
import time

import numpy as np
import openvino
import openvino_genai
from work import arguments, measure

model, requests, prompt, output, options = arguments()
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 4  # GB
scheduler.max_num_seqs = max(requests, 64)
scheduler.max_num_batched_tokens = 512
scheduler.enable_prefix_caching = False
pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", json.loads(options))


decoding = [0.0]


def run(prompts: list[list[int]], num_output: int) -> int:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_output
    config.ignore_eos = True
    config.do_sample = False
    handles = [
        pipeline.add_request(index, openvino.Tensor(np.array([ids], np.int64)), config)
        for index, ids in enumerate(prompts)
    ]
    steps = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        steps.append(time.perf_counter())
    decoding[0] = steps[-1] - steps[-num_output]  # the last step of a prompt makes the first token
    return sum(len(answer.generated_ids) for handle in handles for answer in handle.read_all())


measure(run, requests, prompt, output, lambda: decoding[0])
