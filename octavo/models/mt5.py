"""mT5: T5 1.1 with an untied output layer and unscaled outputs. Xue et al. 2021."""

from __future__ import annotations

from octavo.models.hf_config import HfConfig
from octavo.models.t5 import build_t5, read_shape
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    projection = config.text("feed_forward_proj", "gated-gelu")
    return build_t5(read_shape(config.with_values(feed_forward_proj=projection), scaled=False))
