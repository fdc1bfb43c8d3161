"""The choice between plain torch and Triton's kernels, and which norms are computed together with
the sum before them.
"""

import pytest
import torch

from octavo.api.errors import BackendUnavailable
from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.kernels import choose_kernels
from octavo.executor.torch.row_ops import norms_ahead
from octavo.executor.torch.triton import device as triton_device
from octavo.models.registry import build_programs
from octavo.program import ops
from octavo.program.passes.fuse import fuse
from octavo.program.program import Value
from tests.support.tiny_models import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_by_device(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernels("auto", CPU).name == "plain"
    assert choose_kernels("plain", CUDA).name == "plain"
    assert choose_kernels("triton", CPU).name == "triton"
    assert choose_kernels("auto", CUDA).name == "triton"


def test_a_cpu_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose_kernels("auto", CPU).name == "plain"
    with pytest.raises(
        BackendUnavailable,
        match="torch_kernels: got 'triton', but Triton has no kernels for the device cpu",
    ) as raised:
        TorchBackend(BackendOptions(torch_kernels="triton"))
    assert (
        "--torch-kernels plain" in raised.value.hint and "TRITON_INTERPRET=1" in raised.value.hint
    )


def test_without_triton(monkeypatch):
    monkeypatch.setattr(triton_device.importlib.util, "find_spec", lambda name: None)
    assert choose_kernels("auto", CUDA).name == "plain"
    with pytest.raises(
        BackendUnavailable, match="torch_kernels: got 'triton', but Triton is not installed"
    ):
        choose_kernels("triton", CPU)


@pytest.mark.parametrize(
    ("family", "num_norms"), [("llama", 5), ("qwen2_moe", 5), ("gemma3_text", 7), ("gpt2", 4)]
)
def test_norms_that_are_made_with_the_sum_before_them(family, num_norms):
    """All norms but the first of the model are computed with the sum before them, and but the last,
    which only sampled rows take (gpt2's is of gathered rows too).
    """
    program = fuse(build_programs(tiny_model(family).config)["decoder"])
    assert len(norms_ahead(program.ops)) == num_norms


def test_only_the_very_next_op_s_norm_of_whole_rows():
    x, total, out, other = (Value(name, "tokens", 8) for name in ("x", "total", "out", "other"))
    weight = object()
    add, norm = ops.Add(x, x, total), ops.RmsNorm(total, out, weight, 1e-5)
    assert norms_ahead([add, norm]) == {"total": norm}
    assert not norms_ahead([add, ops.Scale(x, other, 2.0), norm])
    assert not norms_ahead([add, ops.RmsNorm(total, out, weight, 1e-5, group_width=4)])
    assert not norms_ahead([add, ops.RmsNorm(x, out, weight, 1e-5)])
    assert not norms_ahead([ops.Scale(x, total, 2.0), norm])
    reader = ops.Linear(total, (out,), (weight,), norm=ops.PreNorm(weight, 1e-5))
    summed = ops.Linear(x, (total,), (weight,), residual=x)
    assert norms_ahead([summed, reader]) == {"total": reader.norm}
    assert not norms_ahead([summed, ops.Linear(x, (out,), (weight,), norm=reader.norm)])


def test_graphs_may_hold_any_number_of_expert_rows_with_triton_alone(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernels("triton", CPU).captured_rows is None
    assert choose_kernels("plain", CPU).captured_rows == 8
