"""GGUF checkpoints against the transformers models they were made of, and every way a file can be
damaged.
"""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.errors import SetupError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.gguf.gguf_file import read_gguf
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import build_programs
from octavo.program.program import Weight
from tests.support.tiers import examples
from tests.support.tiny_gguf import ARCHITECTURES, SHAPE, interleave, tiny_model, write_tiny_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", tiny_model("llama"), tokens=96
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_the_models(tmp_path: Path, architecture: str) -> None:
    """Names, shapes and row orders are the family's. Bitwise, but for Gemma's norms, which the file
    keeps plus one (one ulp of 1).
    """
    model = tiny_model(architecture)
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", architecture, model))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert set(checkpoint.names()) == set(state)
    reader = WeightReader(checkpoint)
    for name, expected in state.items():
        transposed = architecture == "gpt2" and any(
            part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        )
        expected = expected.T if transposed else expected
        got = reader.load(Weight(name, expected.shape, transposed=transposed)).dequantize()
        np.testing.assert_allclose(
            got, expected, atol=1.2e-7 if architecture == "gemma3" and "norm" in name else 0, rtol=0
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_programs_find_every_weight(tmp_path: Path, architecture: str) -> None:
    """The config of a GGUF header builds the family's Program, and each of its weights loads in its
    shape.
    """
    checkpoint = open_checkpoint(
        write_tiny_gguf(tmp_path / "m.gguf", architecture, tiny_model(architecture), kind="Q8_0")
    )
    program = build_programs(checkpoint.config)["decoder"]
    for quantization in (None, "int8", "int4"):
        reader = WeightReader(checkpoint, quantization=quantization, program=program)
        assert all(reader.load(weight).shape == weight.shape for weight in program.weights)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_interleaved_rows_of_every_kind(tmp_path: Path, kind: str) -> None:
    model = tiny_model("llama")
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", model, kind=kind)
    got = open_checkpoint(path).tensor("model.layers.1.self_attn.k_proj.weight").dequantize()
    stored = read_gguf(path).tensor("blk.1.attn_k.weight").dequantize()
    np.testing.assert_array_equal(interleave(got, 2), stored)
    assert open_checkpoint(path).config["dtype"] == {"F16": "float16", "BF16": "bfloat16"}.get(
        kind, "float32"
    )


def test_config_in_hugging_face_words(llama: Path) -> None:
    config = open_checkpoint(llama).config
    assert config | SHAPE == config
    assert (
        config["model_type"] == "llama"
        and config["rms_norm_eps"] == 1e-6
        and config["head_dim"] == 16
    )
    assert config["attention_bias"] is True and config["tie_word_embeddings"] is False


def test_gemma3_config(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    config = open_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", "gemma3", model)).config
    assert config["layer_types"] == model.config.layer_types == ["sliding_attention"] * 2
    assert config["rope_local_base_freq"] == 10000.0 and config["query_pre_attn_scalar"] == 32
    assert config["sliding_window"] == 16 and config["tie_word_embeddings"] is True


def test_rope_scaling(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=extra)
    assert open_checkpoint(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    extra["llama.rope.scaling.type"] = "wavy"
    path = write_tiny_gguf(tmp_path / "n.gguf", "llama", tiny_model("llama"), extra=extra)
    with pytest.raises(UnsupportedModel, match="'wavy', supported in GGUF: none, linear, yarn"):
        open_checkpoint(path)


def test_header_values_of_wrong_types(tmp_path: Path) -> None:
    for key, message in {
        "general.sampling.temp": "general.sampling.temp is a str, expected int or float",
        "llama.rope.freq_base": "llama.rope.freq_base is 'hot', expected a number",
    }.items():
        path = write_tiny_gguf(
            tmp_path / "m.gguf", "llama", tiny_model("llama"), extra={key: "hot"}
        )
        with pytest.raises(WeightMismatch, match=message):
            open_checkpoint(path)


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """Returns the files of a tiny model in three, beside which a folder has it in one."""
    model = tiny_model("llama")
    whole = tmp_path / "whole"
    whole.mkdir()
    write_tiny_gguf(whole / "m.gguf", "llama", model, tokens=96)
    write_tiny_gguf(tmp_path / "m.gguf", "llama", model, tokens=96, max_tensors=12)
    return sorted(tmp_path.glob("*.gguf"))


def test_a_model_in_several_files(split: list[Path]) -> None:
    """Any part, or their folder, is the whole model."""
    assert len(split) == 3
    whole = open_checkpoint(split[0].parent / "whole" / "m.gguf")
    for path in (split[0], split[2], split[0].parent):
        found = open_checkpoint(path)
        assert set(found.names()) == set(whole.names()) and found.config == whole.config
        assert [file.name for file in found.weight_files] == [part.name for part in split]
        for name in whole.names():
            wanted = whole.tensor(name).dequantize()
            np.testing.assert_array_equal(found.tensor(name).dequantize(), wanted)
        assert found.stored("lm_head.weight").file in split
        found.release()


def test_parts_that_do_not_belong_together(split: list[Path], tmp_path: Path) -> None:
    first, second, third = (part.read_bytes() for part in split)
    split[1].unlink()
    with pytest.raises(WeightMismatch, match=f"missing parts of the model: {split[1].name}"):
        open_checkpoint(split[0])
    split[1].write_bytes(third)
    with pytest.raises(WeightMismatch, match="is labelled part 2 of 3, expected 1 of 3"):
        open_checkpoint(split[0])
    split[1].write_bytes(second)
    (tmp_path / "alone").mkdir()
    renamed = tmp_path / "alone" / "model.gguf"
    renamed.write_bytes(first)
    with pytest.raises(
        WeightMismatch, match="the model has 3 parts, expected file names that end in"
    ):
        open_checkpoint(renamed)


def test_end_ids_and_sampling_defaults(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny_model("llama"),
        tokens=96,
        extra={"general.sampling.temp": 0.7},
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.generation_config["eos_token_id"] == [0, 2]
    assert (
        checkpoint.generation_config["temperature"] == 0.7
        and checkpoint.generation_config["do_sample"] is True
    )
    source = checkpoint.tokenizer_source()
    assert source is not None and source.special_tokens == {"eos_token": "<|endoftext|>"}


def test_plain_floats_are_mapped(llama: Path) -> None:
    file = read_gguf(llama)
    assert np.shares_memory(file.tensor("blk.0.ffn_up.weight").codes, file.data)


def resident_bytes(file: Path) -> int:
    """Returns the resident bytes of a file's mapping in this process."""
    mappings = Path("/proc/self/smaps").read_text().split("\nVmFlags")
    lines = next(mapping for mapping in mappings if str(file) in mapping).splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the system does not say what is resident"
)
@pytest.mark.parametrize("is_directory", [False, True])
def test_what_was_read_is_let_go_of_and_read_again(
    llama: Path, tmp_path: Path, is_directory: bool
) -> None:
    """A mapped file's pages can be released, and are read again on demand."""
    if is_directory:
        tiny_model("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path if is_directory else llama)
    weight = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    before = weight.dequantize().copy()
    assert resident_bytes(checkpoint.weight_files[0]) > 0
    checkpoint.release()
    assert resident_bytes(checkpoint.weight_files[0]) == 0
    np.testing.assert_array_equal(weight.dequantize(), before)


def test_truncated_everywhere_is_one_clear_error(llama: Path, tmp_path: Path) -> None:
    data = llama.read_bytes()
    for length in [0, 3, 8, 23, 24, 100, 1000, 3000, len(data) // 2, len(data) - 1]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:length])
        with pytest.raises(WeightMismatch, match=r"cut\.gguf"):
            open_checkpoint(path)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_damaged_headers_never_crash(llama: Path, data: st.DataObject) -> None:
    """A header with any bytes changed opens, or raises one SetupError."""
    content = bytearray(llama.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, 6000))] = data.draw(st.integers(0, 255))
    path = llama.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.tokenizer_source()
        for name in checkpoint.names():
            checkpoint.tensor(name)
    except SetupError as error:
        assert "damaged.gguf" in str(error)


def test_unknown_things_are_named(llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    cases = {
        b"PK\x03\x04" + content[4:]: "not a GGUF file",
        content[:4] + struct.pack("<I", 1) + content[8:]: "GGUF version 1, expected 2 or 3",
        content.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv7",
        ): ("architecture 'rwkv7', supported in GGUF: .*falcon-h1, .*llama, qwen2, "),
        content.replace(
            b"blk.1.attn_norm.weight", b"blk.1.attn_gate.weight"
        ): "blk.1.attn_gate.weight is unknown in the family llama",
        content.replace(
            b"llama.block_count", b"llama.block_kount"
        ): "the header lacks llama.block_count",
        content.replace(
            b"llama.block_count\x04\0\0\0\x02", b"llama.block_count\x04\0\0\0\x01"
        ): "block_count is 1, but the file has .* 2 layers",
        content.replace(
            b"llama.block_count\x04\0\0\0\x02", b"llama.block_count\x04\0\0\0\xff"
        ): "block_count is 255, but the file",
    }
    for number, (changed, message) in enumerate(cases.items()):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(changed)
        with pytest.raises(SetupError, match=message):
            open_checkpoint(path)


def test_unknown_tensor_type_is_named(llama: Path, tmp_path: Path) -> None:
    content = bytearray(llama.read_bytes())
    name = b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    content[place : place + 4] = struct.pack("<I", 41)
    (tmp_path / "t.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"tensor type 41 \(Q1_0\), supported: F32"):
        open_checkpoint(tmp_path / "t.gguf")


def test_directories(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to(llama)
    assert open_checkpoint(tmp_path).config["model_type"] == "llama"
    (tmp_path / "b.gguf").symlink_to(llama)
    with pytest.raises(WeightMismatch, match=r"holds 2 \.gguf files"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightMismatch, match="no such file or directory"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightMismatch, match=r"neither config\.json"):
        open_checkpoint(tmp_path / "empty")


@pytest.mark.model
def test_the_default_models_tensors_bitwise() -> None:
    """The default model's tensors equal gguf-py's bit for bit, of every kind and both row
    orders.
    """
    path = resolve("smollm2")
    checkpoint = open_checkpoint(path)
    assert (
        checkpoint.config["rope_theta"] == 100000.0
        and checkpoint.config["tie_word_embeddings"] is True
    )
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    cases = {
        "model.embed_tokens.weight": ("token_embd.weight", 0),
        "model.norm.weight": ("output_norm.weight", 0),
        "model.layers.7.mlp.down_proj.weight": ("blk.7.ffn_down.weight", 0),
        "model.layers.7.self_attn.q_proj.weight": ("blk.7.attn_q.weight", 9),
        "model.layers.29.self_attn.k_proj.weight": ("blk.29.attn_k.weight", 3),
    }
    for name, (source, heads) in cases.items():
        got = checkpoint.tensor(name).dequantize()
        got = interleave(got, heads) if heads else got
        assert (
            got.tobytes()
            == gguf.quants.dequantize(stored[source].data, stored[source].tensor_type).tobytes()
        )


def test_files_for_other_machines_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: got a big-endian GGUF file, expected"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [(["a", "a"], [], "the key 'a' occurs twice"), ([], ["x", "x"], "'x' occurs twice in its dir")],
)
def test_names_that_stand_twice(
    tmp_path: Path, keys: list[str], tensors: list[str], message: str
) -> None:
    """A reader cannot know which of the two is meant; llama.cpp refuses such files, too."""

    def text(name: str) -> bytes:
        return struct.pack("<Q", len(name)) + name.encode()

    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    header += b"".join(text(key) + struct.pack("<II", 4, 1) for key in keys)
    header += b"".join(text(name) + struct.pack("<IQIQ", 1, 8, 0, 0) for name in tensors)
    (tmp_path / "m.gguf").write_bytes(header + bytes(256))
    with pytest.raises(WeightMismatch, match=message):
        read_gguf(tmp_path / "m.gguf")
