"""The device on which tests of Triton's kernels compute: the GPU where there is one, else a CPU
with Triton's interpreter.
"""

import torch

from octavo.executor.torch.triton.device import is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu")
