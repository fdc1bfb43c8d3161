"""Python's share of a step, from the schedule to the front's outputs, with a device that takes no time."""

import time

import numpy as np

from octavo.backends.base import SampleResult, StepOutput
from octavo.engine.admission import PromptLimits
from octavo.engine.client import InProcessClient
from octavo.engine.input_processor import InputProcessor, ModelLimits
from octavo.engine.output_processor import OutputProcessor
from octavo.sampling_params import SamplingParams
from tests.engine.core_builders import INFO
from tests.engine.fakes import VOCAB, make_core
from tests.worker.fakes import make_worker


class InstantRunnable:
    weight_bytes = 0

    def run(self, batch, kv):
        num = len(batch.sample_rows)
        return StepOutput(SampleResult(np.full(num, 5, np.int32), np.zeros(num, bool)))


def microseconds_a_step(num_requests, num_steps=200):
    """The 20th percentile of decode steps: what else runs on the machine is not ours."""
    worker = make_worker(InstantRunnable(), num_blocks=4, max_rows=num_requests, max_model_len=1024)
    core = make_core(num_blocks=65 * num_requests, budget=1 << 20, max_num_seqs=num_requests, max_model_len=1024, executor=worker)
    client = InProcessClient(core, INFO)
    inputs = InputProcessor(limits=ModelLimits(VOCAB, PromptLimits(None, 1024, 1 << 30), 20), tokenizer=None, eos_token_ids=[2], seed=0)
    outputs = OutputProcessor(None)
    for index in range(num_requests):
        request = inputs.process(str(index), list(range(100)), SamplingParams(max_tokens=None))
        outputs.add(request)
        client.add(request.samples)
    client.receive()
    times = []
    for _ in range(num_steps):
        began = time.perf_counter()
        changes = outputs.process(client.receive().outputs, began)
        finished = [request_id for request_id in changes.request_ids if outputs.is_finished(request_id)]
        times.append(time.perf_counter() - began)
        assert not finished and len(changes.request_ids) == num_requests
    return sorted(times)[num_steps // 5] * 1e6


def test_pythons_share_of_a_step():
    """150 microseconds for one running request, 10 for each further one; measured are about 55 and 4 (2 cores of a Xeon, 2026)."""
    for _ in range(3):  # a noisy neighbour gets two more chances
        one, many = microseconds_a_step(1), microseconds_a_step(64)
        each = (many - one) / 63
        if one < 150 and each < 10:
            return
    raise AssertionError(f"{one:.0f} microseconds for one request, {each:.1f} for each further one")
