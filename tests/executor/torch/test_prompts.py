"""PyTorch's attention of prompts over gathered keys equals plain PyTorch's over masks."""

from dataclasses import replace

import pytest
import torch

from octavo.executor.torch.attention import prompts
from octavo.executor.torch.attention.sdpa import Sdpa
from tests.executor.torch.triton.attention_case import Case

pytest.importorskip("triton")

HALF = {"kv": torch.bfloat16, "dtype": torch.bfloat16}
CASES = {
    "a prompt": Case(requests=((300, 300),), pad=0, **HALF),
    "a later chunk": Case(requests=((260, 700),), **HALF),
    "beside decode": Case(requests=((1, 90), (300, 300), (270, 600), (1, 17)), **HALF),
    "one KV head": Case(requests=((280, 280),), heads=3, kv_heads=1, **HALF),
    "int8": Case(requests=((256, 300),), kv=torch.int8, dtype=torch.bfloat16),
    "fp16": Case(requests=((256, 300),), kv=torch.float16, dtype=torch.float16),
    "a window that hides nothing": Case(requests=((256, 300),), window=300, **HALF),
}
REJECTED = {
    "few rows": Case(requests=((300, 300), (5, 300), (5, 40)), **HALF),
    "fp32": Case(requests=((300, 300),)),
    "a window": replace(CASES["a prompt"], window=299),
    "chunks": replace(CASES["a prompt"], window=299, chunks=True),
    "full": replace(CASES["a prompt"], full=True),
    "softcap": replace(CASES["a prompt"], softcap=2.0),
    "sinks": replace(CASES["a prompt"], sinks=True),
    "slopes": replace(CASES["a prompt"], bias="slopes"),
    "latent": replace(CASES["a prompt"], latent=True, kv_heads=1, k_width=40),
    "another width of values": replace(CASES["a prompt"], v_width=16),
    "a width that is no multiple of 8": replace(CASES["a prompt"], k_width=20, v_width=20),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_several(name):
    case = CASES[name]
    call = case.call
    assert prompts.gains(call)
    out = torch.zeros_like(call.q)
    prompts.attend(call, out)
    wanted = Sdpa().attend(call)
    rows = torch.zeros(len(out), dtype=torch.bool)
    for span in call.rows.spans:
        rows[span.start : span.stop] = True
    torch.testing.assert_close(out[rows], wanted[rows], rtol=2e-2, atol=2e-2)
    assert not out[~rows].any(), "rows of other requests are left as they are"


@pytest.mark.parametrize("name", REJECTED)
def test_other_calls(name):
    assert not prompts.gains(REJECTED[name].call)
