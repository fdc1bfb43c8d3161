"""Which files of a repository a reference means."""

from __future__ import annotations

import pytest

from octavo.api.errors import DownloadFailed
from octavo.checkpoint.hub_files import ChosenFiles, choose_files, choose_tower, gguf_models
from octavo.config.model_reference import parse_hub_reference

QUANTS = ("IQ4_XS", "Q2_K", "Q4_0", "Q4_K_M", "Q4_K_S", "Q6_K", "Q8_0")
PLAIN = [f"Qwen3-4B-{quant}.gguf" for quant in QUANTS]
UNSLOTH = [
    "README.md",
    "config.json",
    "mmproj-F16.gguf",
    "mmproj-BF16.gguf",
    "imatrix_unsloth.gguf",
    *PLAIN,
    "Qwen3-4B-UD-Q4_K_XL.gguf",
    "BF16/Qwen3-4B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3-4B-BF16-00002-of-00002.gguf",
    "UD-Q2_K_XL/Qwen3-4B-00001-of-00003.gguf",
    "UD-Q2_K_XL/Qwen3-4B-00002-of-00003.gguf",
    "UD-Q2_K_XL/Qwen3-4B-00003-of-00003.gguf",
]
SAFETENSORS = ["config.json", "model.safetensors", "tokenizer.json", "onnx/model.json", "a.bin"]


def chosen(text: str, names: list[str]) -> ChosenFiles:
    reference = parse_hub_reference(text)
    assert reference is not None
    return choose_files(reference, names)


@pytest.mark.parametrize(
    ("text", "main"),
    [
        ("o/r", "Qwen3-4B-Q4_K_M.gguf"),
        ("o/r:Q8_0", "Qwen3-4B-Q8_0.gguf"),
        ("o/r:q8_0", "Qwen3-4B-Q8_0.gguf"),
        ("o/r:iq4_xs", "Qwen3-4B-IQ4_XS.gguf"),
        ("o/r:Q4_K_XL", "Qwen3-4B-UD-Q4_K_XL.gguf"),
        ("o/r:UD-Q4_K_XL", "Qwen3-4B-UD-Q4_K_XL.gguf"),
        ("o/r:ud-q2_k_xl", "UD-Q2_K_XL/Qwen3-4B-00001-of-00003.gguf"),
        ("o/r:BF16", "BF16/Qwen3-4B-BF16-00001-of-00002.gguf"),
        ("o/r:latest", "Qwen3-4B-Q4_K_M.gguf"),
        ("o/r/Qwen3-4B-Q2_K.gguf", "Qwen3-4B-Q2_K.gguf"),
        ("o/r/BF16/Qwen3-4B-BF16-00002-of-00002.gguf", "BF16/Qwen3-4B-BF16-00001-of-00002.gguf"),
    ],
)
def test_the_model_that_is_named(text: str, main: str) -> None:
    found = chosen(text, UNSLOTH)
    assert found.main == main
    *parts, tower = found.files
    assert len(parts) == (int(main[-10:-5]) if "-of-" in main else 1)
    assert tower == "mmproj-F16.gguf"


@pytest.mark.parametrize(
    ("towers", "model", "chosen_tower"),
    [
        (["mmproj-Q8_0.gguf", "mmproj-BF16.gguf"], "m-Q8_0.gguf", "mmproj-BF16.gguf"),
        (["mmproj-Q8_0.gguf", "m.mmproj.gguf"], "m.gguf", "m.mmproj.gguf"),
        (["mmproj-F16.gguf", "Q8_0/mmproj-F32.gguf"], "Q8_0/m.gguf", "Q8_0/mmproj-F32.gguf"),
        (["mmproj-F16.gguf"], "4B-Q8_0/m.gguf", "mmproj-F16.gguf"),
        (["mmproj-F16.gguf", "other/mmproj-F16.gguf"], "small/m.gguf", None),
        (["mmproj.json", "mmproj/m-F16.gguf"], "m.gguf", None),
    ],
)
def test_the_tower_of_a_model(towers: list[str], model: str, chosen_tower: str | None) -> None:
    assert choose_tower([*towers, model], model) == chosen_tower


@pytest.mark.parametrize(
    ("names", "main"),
    [
        (["m.Q8_0.gguf", "m.Q4_0.gguf", "m.Q5_K_M.gguf"], "m.Q4_0.gguf"),
        (["m-f16.gguf", "m-q8_0.gguf"], "m-q8_0.gguf"),
        (["b.gguf", "a.gguf"], "a.gguf"),
        (["m-TQ1_0.gguf", "m-IQ1_S.gguf"], "m-IQ1_S.gguf"),
        (["m-Q4_K_M-00001-of-00002.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b-F16.gguf"], "gpt-oss-20b-mxfp4.gguf"),
    ],
)
def test_the_default(names: list[str], main: str) -> None:
    assert chosen("o/r", names).main == main


def test_names_of_quantizations() -> None:
    names = {
        "Llama-3.2-1B-Instruct-Q4_K_M.gguf": "Q4_K_M",
        "tinyllama-1.1b-chat-v1.0.Q4_0.gguf": "Q4_0",
        "phi-4-q4.gguf": "Q4",
        "gemma-3-4b-it-UD-IQ1_S.gguf": "UD-IQ1_S",
        "Q3_K_L/x-00001-of-00001.gguf": "Q3_K_L",
        "x-Q4_0_4_4.gguf": "Q4_0_4_4",
        "ggml-model-f16.gguf": "F16",
        "Qwen3-0.6B.gguf": "",
        "BigQ4model.gguf": "",
    }
    assert {model.main: model.quant for model in gguf_models(names)} == names


def test_safetensors_come_before_gguf_unless_one_is_named() -> None:
    both = [*SAFETENSORS, "m-Q4_K_M.gguf"]
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    assert chosen("o/r", both) == ChosenFiles(wanted)
    assert chosen("o/r", SAFETENSORS) == ChosenFiles(wanted)
    assert chosen("o/r:q4_k_m", both).main == "m-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        (
            "o/r:Q9_K",
            UNSLOTH,
            "o/r has no quantization Q9_K: available are BF16, IQ4_XS, Q2_K, Q4_0, Q4_K_M, Q4_K_S,"
            " Q6_K, Q8_0, UD-Q4_K_XL, UD-Q2_K_XL\nhint: o/r:Q4_K_M",
        ),
        ("o/r:Q4_K", PLAIN, "o/r has no quantization Q4_K: available are IQ4_XS, Q2_K"),
        (
            "o/r/x.gguf",
            ["y.gguf"],
            "o/r has no file x.gguf: available are y.gguf\nhint: o/r/y.gguf",
        ),
        ("o/r:Q4_0", SAFETENSORS, "o/r has no quantization Q4_0: it has no GGUF files"),
        (
            "o/r:Q4_0",
            ["x-Q4_0-00002-of-00002.gguf", "x-Q8_0.gguf"],
            "o/r:Q4_0: the repository has 1 of the model's 2 parts\nhint: o/r:Q8_0",
        ),
    ],
)
def test_what_is_not_there(text: str, names: list[str], message: str) -> None:
    with pytest.raises(DownloadFailed) as error:
        chosen(text, names)
    assert str(error.value).startswith(message)
