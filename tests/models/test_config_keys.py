"""A key of config.json that nothing reads is refused by name; published files' keys are known."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import INERT
from octavo.models.registry import build_programs
from tests.support.chatglm import chatglm_config
from tests.support.published_configs import PUBLISHED
from tests.support.tiny_encoders import ENCODERS, encoder_config
from tests.support.tiny_models import FAMILIES, tiny_model


def config_of(family):
    if family == "chatglm":
        return chatglm_config(tiny_model("glm").config)
    return encoder_config(family) if family in ENCODERS else tiny_model(family).config


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS, "chatglm"])
def test_a_key_that_nothing_reads_is_refused(family):
    config = config_of(family)
    with pytest.raises(UnsupportedModel, match="attention_warp = 2 is unknown for"):
        build_programs(config | {"attention_warp": 2}, every_key=True)
    build_programs(config | {"attention_warp": None, "use_attention_warp": False}, every_key=True)


def test_a_misspelt_key_comes_with_the_right_one():
    config = tiny_model("llama").config
    with pytest.raises(UnsupportedModel) as refused:
        build_programs(config | {"atention_bias": True}, every_key=True)
    assert refused.value.hint == "did you mean attention_bias?"


@pytest.mark.parametrize(
    ("family", "table", "asked"),
    [
        ("llama", "rope_parameters", "rope_parameters"),
        ("mistral", "rope_scaling", "rope_parameters"),
        ("mpt", "attn_config", "mpt's attn_config"),
    ],
)
def test_a_key_of_a_table_that_nothing_reads_is_refused(family, table, asked):
    config = tiny_model("llama" if family == "mistral" else family).config
    given = config.get(table) or {"type": "linear", "factor": 2.0}
    for value in (None, False):
        build_programs(config | {table: given | {"warp": value}}, every_key=True)
    with pytest.raises(UnsupportedModel, match=f"warp = 2 is unknown for {asked}"):
        build_programs(config | {table: given | {"warp": 2}}, every_key=True)


def test_sections_of_positions_change_nothing_for_texts():
    config = tiny_model("qwen3_5_text").config
    sections = {"mrope_section": [1, 2, 1], "mrope_interleaved": True}
    rope = config["rope_parameters"] | sections
    assert build_programs(config | {"rope_parameters": rope}, every_key=True) == build_programs(
        config
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_known(family):
    """Every default of the family's configuration class is read or without effect."""
    defaults = CONFIG_MAPPING[family]().to_dict()
    build_programs(defaults | config_of(family), every_key=True)


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_published_files_hold_is_known(family):
    build_programs(config_of(family) | PUBLISHED[family], every_key=True)


def test_what_changes_numbers_is_not_inert():
    for name in ("rope_theta", "layer_types", "attention_bias", "tie_word_embeddings"):
        assert name not in INERT
