"""Family cards: every fact names something that the engine has, and sizes are those published."""

import json
import re

import pytest

from octavo.checkpoint.family_cards import find_card, get_cards
from octavo.config.engine_config import EngineConfig
from octavo.frontend.sampling_defaults import NAMES, SamplingDefaults
from octavo.models.registry import FAMILIES
from octavo.text.end_tokens import END_TEXTS
from octavo.text.parsers.formats import named_reasoning_format, named_tool_format
from octavo.wiring.family_memory import estimate_memory

PUBLISHED = {
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-3-270m-it": 268_098_176,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "microsoft/phi-4": 14_659_507_200,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "openai/gpt-oss-20b": 20_914_757_184,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "allenai/OLMo-2-0425-1B-Instruct": 1_484_916_736,
}
"""Parameters of the published safetensors files."""

every_card = pytest.mark.parametrize("name", get_cards())


@every_card
def test_a_card_names_what_the_engine_has(name):
    card = get_cards()[name]
    assert set(card.model_types) <= FAMILIES.keys()
    assert all(map(named_tool_format, card.tools))
    assert card.reasoning is None or named_reasoning_format(card.reasoning)
    assert {each.config["model_type"] for each in card.checkpoints} <= set(card.model_types)
    turns = {"<|user|>", "<|observation|>"}  # of GLM, whose generation_config lists them
    assert set(card.ends) - turns <= set(END_TEXTS)
    for flag in card.flags:
        words = flag.flag.removeprefix("--").split()
        EngineConfig.from_options(**{words[0].replace("-", "_"): words[1]})


@every_card
def test_recommended_values_are_accepted_as_overrides(name):
    for each in get_cards()[name].sampling:
        assert each.values.keys() <= NAMES.keys()
        SamplingDefaults.from_generation_config(each.values, name)


@every_card
def test_a_checkpoint_has_the_size_in_its_name(name):
    """One of each family; those with a published count have exactly that."""
    card = get_cards()[name]
    checkpoints = [each for each in card.checkpoints if each.repository in PUBLISHED]
    for each in checkpoints or card.checkpoints[:1]:
        size = estimate_memory(each, card.bits[:1])
        if each.repository in PUBLISHED:
            assert size.num_parameters == PUBLISHED[each.repository]
        elif named := re.search(r"(?<![\d.E])(\d+(?:\.\d+)?)[bB]", each.repository):
            assert size.num_parameters == pytest.approx(float(named[1]) * 1e9, rel=0.3)
        least = size.num_parameters * card.bits[0] / 8  # scales and 8-bit embeddings come on top
        assert least < size.weight_bytes[card.bits[0]] < 2 * least


@pytest.mark.parametrize(
    ("model_type", "names", "family"),
    [
        ("llama", ["smollm2"], "smollm"),
        ("llama", [None, "Meta Llama 3.1 8B Instruct"], "llama3"),
        ("llama", ["model", "./Mistral-7B-Instruct-v0.3.Q4_K_M.gguf"], "mistral"),
        ("qwen3", ["DeepSeek-R1-0528-Qwen3-8B"], "deepseek"),
        ("qwen2", ["Qwen/Qwen2.5-Coder-7B-Instruct"], "qwen2.5"),
        ("bert", ["minilm"], "embeddings"),
    ],
)
def test_a_checkpoint_is_found_by_its_name(model_type, names, family):
    assert find_card(model_type, *names)[0] == family


@pytest.mark.parametrize(("model_type", "name"), [("llama", "Yi-6B"), ("gpt2", "smollm2")])
def test_other_checkpoints_have_no_card(model_type, name):
    assert find_card(model_type, name) is None


def test_octavo_models_prints_a_card(octavo):
    out = octavo("models", "smollm").out
    assert "SmolLM2: temperature 0.2, top_p 0.9" in out and "tool format   hermes" in out
    assert "135 M parameters, context 8,192: 4 bits 96.3 MiB" in out
    found = json.loads(octavo("models", "smollm", "--json").out)
    assert found["sampling"][0]["values"] == {"temperature": 0.2, "top_p": 0.9}
    assert found["checkpoints"][0]["num_parameters"] == 134_515_008


def test_octavo_show_names_the_card_and_applies_nothing_of_it(octavo):
    found = json.loads(octavo("show", "smollm2", "--json").out)
    assert found["family"] == "smollm" and found["sampling"]["temperature"] == 0
    out = octavo("show", "smollm2").out
    assert "model card     SmolLM2: temperature 0.2, top_p 0.9; SmolLM3" in out
