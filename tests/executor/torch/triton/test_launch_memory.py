"""A kernel that goes past the end of a tensor fails, which the other tests of kernels rely on."""

import pytest
import torch
import triton
import triton.language as tl

from octavo.executor.torch.triton.device import is_interpreted

pytestmark = pytest.mark.skipif(
    not is_interpreted(), reason="only Triton's interpreter looks at every lane; a GPU does not"
)


@triton.jit
def copy_kernel(x, out, read, written, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < read, other=0.0), mask=at < written)


@pytest.mark.parametrize(
    ("read", "written", "fault"),
    [
        (5, 5, None),
        (0, 0, None),
        (6, 5, "1 of 6 lanes read outside of the launch's tensors"),
        (5, 8, "3 of 8 lanes write outside"),
    ],
)
@pytest.mark.parametrize("offset", [0, 3])
def test_lanes_past_the_end(read, written, fault, offset):
    """Lanes past the end fail for parts of larger tensors too: what lies behind a part does not
    belong to it.
    """
    x, out = torch.arange(5.0), torch.zeros(5 + offset + 16)[offset : 5 + offset]
    if fault is None:
        copy_kernel[(1,)](x, out, read, written, BLOCK=8)
        assert (out[:written] == x[:written]).all()
        return
    with pytest.raises(Exception, match=fault):
        copy_kernel[(1,)](x, out, read, written, BLOCK=8)
    assert not out.any()
