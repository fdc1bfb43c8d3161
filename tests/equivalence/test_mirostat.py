"""Mirostat's bound is the request's own: it outlasts preemption and the loss of a core, and holds
the tokens' surprise where it is wanted.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from octavo import SamplingParams
from octavo.engine.clients.ledger import RequestLedger
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.recording.recorder import read_log
from octavo.engine.recording.replay import Replay
from tests.equivalence.test_llm_equivalence import Setup
from tests.support.llm_tools import alone, fingerprint, prompts_of

STEERED = SamplingParams(
    temperature=1.3,
    seed=5,
    max_tokens=40,
    ignore_eos=True,
    mirostat_mode=2,
    mirostat_tau=3.0,
    mirostat_eta=0.2,
    logprobs=1,
)
PARAMS = [STEERED, msgspec.structs.replace(STEERED, mirostat_mode=1, mirostat_tau=2.0)]
SETUP = Setup("native", "llama", "fp32")


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_mirostat_goes_on_with_its_bound(mode: str, tmp_path: Path) -> None:
    """Preempted requests with mirostat draw what they draw alone, by swap and by recomputation; a
    recording of them plans the same again, bounds included.
    """
    log = tmp_path / "log"
    prompts = prompts_of(20, 25, 30, 33)
    params = PARAMS * 2
    options = {"max_model_len": 80, "preemption_mode": mode}
    with SETUP.llm(**options) as llm:
        expected = [
            alone(llm, prompt, given) for prompt, given in zip(prompts, params, strict=True)
        ]
    with SETUP.llm_of_blocks(8, record=str(log), **options) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.get_metrics().num_preemptions > 0
    assert [fingerprint(output) for output in outputs] == expected
    header, events = read_log(log)
    assert Replay(header).run(events).differences == []


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_the_surprise_comes_near_what_is_wanted(backend: str) -> None:
    """A lower aim gives less surprising tokens; both versions of mirostat steer."""
    prompt = prompts_of(20)[0]
    with Setup(backend, "llama", "fp32").llm(max_model_len=128) as llm:
        for mode in (1, 2):
            sums = []
            for tau in (0.5, 6.0):
                params = msgspec.structs.replace(STEERED, mirostat_mode=mode, mirostat_tau=tau)
                sums.append(llm.generate(prompt, params)[0].outputs[0].cumulative_logprob)
            assert sums[0] > sums[1] + 10, f"mirostat {mode}: {sums}"


def test_a_new_core_is_told_the_bound() -> None:
    """A request that goes on in another core takes its last bound along with its tokens."""
    ledger = RequestLedger()
    ledger.add([EngineRequest("a", [1, 2], STEERED, seed=5)])
    request = ledger.unfinished["a"]
    assert request.resumed().mirostat_mu is None
    request.add_output(EngineOutput("a", [7], mirostat_mu=5.5))
    request.add_output(EngineOutput("a", [8], mirostat_mu=5.25))
    resumed = request.resumed()
    assert (resumed.output_token_ids, resumed.mirostat_mu) == ([7, 8], 5.25)
