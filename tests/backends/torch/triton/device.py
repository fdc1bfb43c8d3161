"""Where tests of Triton's kernels compute: on the GPU where there is one, else in Triton's
interpreter.
"""

import torch

from octavo.backends.torch.triton.device import is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu")
