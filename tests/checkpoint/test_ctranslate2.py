"""A Whisper in CTranslate2's format is converted with the core dependencies alone."""

import json
import struct
import sys

import numpy as np
import pytest

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.ctranslate2 import LAYER_PARTS, MERGED, convert_whisper
from octavo.checkpoint.open import open_checkpoint

WIDTH, FFN, BANDS, VOCABULARY = 8, 12, 4, 20
TOKENS = ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>", "<|startofprev|>")


def variables_of(generator):
    """Returns the variables of a model with one layer in each stack."""

    def drawn(*shape):
        return generator.standard_normal(shape).astype(np.float16)

    found = {
        "decoder/embeddings/weight": drawn(VOCABULARY, WIDTH),
        "encoder/conv1/weight": drawn(WIDTH, BANDS, 3),
        "encoder/conv1/bias": drawn(WIDTH),
        "encoder/conv2/weight": drawn(WIDTH, WIDTH, 3),
        "encoder/conv2/bias": drawn(WIDTH),
    }
    for stack in ("encoder", "decoder"):
        found[f"{stack}/num_heads"] = np.array(2, np.int16)
        found[f"{stack}/position_encodings/encodings"] = drawn(10, WIDTH)
        layer = f"{stack}/layer_0"
        for ours in LAYER_PARTS.values():
            if ours.startswith("attention/") and stack == "encoder":
                continue
            rows = FFN if ours.endswith("ffn/linear_0") else WIDTH
            inputs = FFN if ours.endswith("ffn/linear_1") else WIDTH
            if ours.endswith("layer_norm"):
                found[f"{layer}/{ours}/gamma"] = drawn(WIDTH)
                found[f"{layer}/{ours}/beta"] = drawn(WIDTH)
            else:
                found[f"{layer}/{ours}/weight"] = drawn(rows, inputs)
                found[f"{layer}/{ours}/bias"] = drawn(rows)
        for ours, parts in MERGED.values():
            if ours.startswith("attention/") and stack == "encoder":
                continue
            found[f"{layer}/{ours}/weight"] = drawn(len(parts) * WIDTH, WIDTH)
            found[f"{layer}/{ours}/bias"] = drawn(len(parts) * WIDTH)
        found[f"{stack}/layer_norm/gamma"] = drawn(WIDTH)
        found[f"{stack}/layer_norm/beta"] = drawn(WIDTH)
    return found


def save(folder, variables):
    """Writes a model in version 6 of CTranslate2's format."""
    kinds = {np.dtype(np.float16): 4, np.dtype(np.int16): 2}

    def text(name):
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, each in variables.items():
        data += text(name) + struct.pack(f"<B{each.ndim}I", each.ndim, *each.shape)
        data += struct.pack("<BI", kinds[each.dtype], each.nbytes) + each.tobytes()
    (folder / "model.bin").write_bytes(data + struct.pack("<I", 0))
    added = [{"content": content, "id": i} for i, content in enumerate(TOKENS)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [7]}))


@pytest.fixture
def source(tmp_path, monkeypatch):
    for name in ("safetensors", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def test_a_model_is_converted_without_other_packages(source, tmp_path):
    variables = variables_of(np.random.default_rng(1))
    save(source, variables)
    convert_whisper(source, tmp_path / "target")
    checkpoint = open_checkpoint(tmp_path / "target")
    assert checkpoint.config["encoder_ffn_dim"] == FFN
    assert checkpoint.generation_config["suppress_tokens"] == [7]

    def stored(name):
        return checkpoint.tensor(name).codes

    np.testing.assert_array_equal(
        stored("model.decoder.embed_tokens.weight"), variables["decoder/embeddings/weight"]
    )
    stacked = variables["decoder/layer_0/self_attention/linear_0/weight"]
    parts = [
        stored(f"model.decoder.layers.0.self_attn.{name}_proj.weight") for name in ("q", "k", "v")
    ]
    np.testing.assert_array_equal(np.concatenate(parts), stacked)
    np.testing.assert_array_equal(
        stored("model.encoder.conv1.weight"), variables["encoder/conv1/weight"]
    )


def test_a_truncated_file_is_rejected(source, tmp_path):
    save(source, variables_of(np.random.default_rng(1)))
    file = source / "model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match=r"model\.bin: truncated: got"):
        convert_whisper(source, tmp_path / "target")
