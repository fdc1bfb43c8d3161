"""References to models of the hub: every spelling, and texts that are none."""

from __future__ import annotations

import pytest

from octavo.config.model_reference import HubReference, parse_hub_reference, same_model

Q4 = HubReference("unsloth/Qwen3-4B-GGUF", quant="Q4_K_M")
FILE = HubReference("a/b", file="UD/x-Q8_0.gguf")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("unsloth/Qwen3-4B-GGUF:Q4_K_M", Q4),
        ("hf.co/unsloth/Qwen3-4B-GGUF:Q4_K_M", Q4),
        ("HF.co/unsloth/Qwen3-4B-GGUF:Q4_K_M", Q4),
        ("huggingface.co/unsloth/Qwen3-4B-GGUF:Q4_K_M", Q4),
        ("https://huggingface.co/unsloth/Qwen3-4B-GGUF:Q4_K_M", Q4),
        ("https://hf.co/unsloth/Qwen3-4B-GGUF/tree/main/Q4_K_M", Q4),
        ("a/b", HubReference("a/b")),
        ("a/b:latest", HubReference("a/b")),
        ("a/b:UD-Q4_K_XL", HubReference("a/b", quant="UD-Q4_K_XL")),
        ("https://huggingface.co/a/b/", HubReference("a/b")),
        ("https://huggingface.co/a/b/tree/main", HubReference("a/b")),
        ("https://huggingface.co/a/b/blob/main/config.json", HubReference("a/b")),
        ("gpt2", HubReference("gpt2")),
        ("a/b/UD/x-Q8_0.gguf", FILE),
        ("hf.co/a/b/UD/x-Q8_0.gguf", FILE),
        ("https://huggingface.co/a/b/blob/main/UD/x-Q8_0.gguf", FILE),
        ("https://huggingface.co/a/b/resolve/main/UD/x-Q8_0.gguf?download=true", FILE),
        (
            "https://huggingface.co/a/b/resolve/v1/x%20y.gguf",
            HubReference("a/b", file="x y.gguf", revision="v1"),
        ),
        ("http://127.0.0.1:99/a/b:F16", HubReference("a/b", quant="F16")),
    ],
)
def test_spellings(text: str, reference: HubReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:99")
    assert parse_hub_reference(text) == reference
    assert parse_hub_reference(str(reference)) == HubReference(
        reference.repository, reference.file, reference.quant
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", ".", "..", "../x", "../../x", "/etc/passwd", "~/x", "a/", "/b", "a//b", "./a/b"),
        *("a/../b", "a/b/../../x.gguf", "a/b/..", "a/b/c", "a/b/c/d", "x.gguf", "a/x.gguf", "a/b:"),
        *("a/b:Q4/x.gguf", "a/b:Q4:Q5", "a b/c", "a/b\0", "a/b\n", "a/b:../x", "a/b/x\\y.gguf"),
        *(
            "hf.co",
            "hf.co/",
            "hf.co/../x",
            "https://example.org/a/b",
            "ftp://hf.co/a/b",
            "https://",
        ),
        *("https://huggingface.co/a/b/blob/main/../../x.gguf", "http://[/a/b"),
        "https://huggingface.co/a/b/resolve/../x.gguf",
        "https://huggingface.co/a/b/resolve/main/%2e%2e/x.gguf",
    ],
)
def test_texts_that_are_no_reference(text: str) -> None:
    assert parse_hub_reference(text) is None


def test_spellings_of_one_model_are_the_same() -> None:
    assert same_model("hf.co/A/b:q4_k_m", "https://huggingface.co/a/B:Q4_K_M")
    assert same_model("./x", "./x")
    assert not same_model("a/b:Q4_K_M", "a/b:Q4_K_S")
    assert not same_model("./x", "./y")
