"""A Program that is cut into stages makes what the whole makes, to the last bit, and what cannot be
cut is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from octavo.api.errors import ConfigError
from octavo.checkpoint.open import open_checkpoint
from octavo.models.registry import build_programs
from octavo.program import ops
from octavo.program.passes.stages import stages
from octavo.program.program import Program
from tests.support.tiny_models import tiny_model

LAYERS = {"num_hidden_layers": 4}
FAMILIES = ("llama", "gemma2", "qwen3_moe", "gpt2", "deepseek_v3", "falcon")


def program_of(family: str, **overrides: Any) -> Program:
    return build_programs(open_checkpoint(tiny_model(family, **overrides).path).config)["decoder"]


def num_layers(program: Program) -> int:
    return sum(group.num_layers for group in program.groups)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_each_layer_is_in_one_stage(num_stages: int) -> None:
    whole = program_of("llama", **LAYERS)
    parts = stages(whole, num_stages)
    assert [op.weights for part in parts for op in part.ops] == [op.weights for op in whole.ops]
    assert sum(map(num_layers, parts)) == num_layers(whole)
    for before, after in pairwise(parts):
        assert before.outputs["hidden"] == after.inputs["hidden"]
    assert "hidden" not in parts[0].inputs and parts[-1].outputs == whole.outputs
    written = [op.layer for op in parts[-1].ops if isinstance(op, ops.KvWrite)]
    assert written == list(range(len(written)))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_cut_at_their_layers(family: str) -> None:
    whole = program_of(family)
    first, second = stages(whole, 2)
    assert num_layers(first) and num_layers(second)
    assert len(first.ops) + len(second.ops) == len(whole.ops)
    assert not {*first.weights} & {*second.weights} - {whole.ops[0].weights[0]}


def test_the_heaviest_stage_is_as_light_as_it_can_be() -> None:
    """The head is heavy here: the last stage has fewer layers than the first."""
    whole = program_of("llama", num_hidden_layers=6, vocab_size=2000, tie_word_embeddings=False)
    first, second = stages(whole, 2)
    assert num_layers(first) > num_layers(second)


@pytest.mark.parametrize(
    ("family", "overrides", "num_stages", "message"),
    [
        ("llama", {"num_hidden_layers": 2}, 3, "got 3, but decoder can be split at only 1 points"),
        ("bamba", {}, 2, "would have no layer of the cache group"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    family: str, overrides: dict[str, Any], num_stages: int, message: str
) -> None:
    programs = build_programs(open_checkpoint(tiny_model(family, **overrides).path).config)
    (program,) = programs.values()
    with pytest.raises(ConfigError, match=message):
        stages(program, num_stages)


def test_what_does_not_generate_is_refused() -> None:
    program = program_of("llama")
    pooling = replace(program, outputs={"pooled": program.outputs["logits"]})
    with pytest.raises(
        ConfigError, match="computes pooled; pipeline stages require a generation model"
    ):
        stages(pooling, 2)


def test_a_cut_leaves_the_numbers_of_layers_from_zero_on() -> None:
    parts = stages(program_of("llama", **LAYERS), 4)
    for part in parts:
        layers = {op.layer for op in part.ops if isinstance(op, ops.Attention)}
        assert layers == set(range(part.groups[0].num_layers))
    assert np.prod([part.groups[0].num_layers for part in parts]) == 1
