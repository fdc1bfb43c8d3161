"""A backend takes the memory that it predicts from the headers alone."""

import pytest

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.open import open_checkpoint, open_header
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.formats import FLOAT_CODES, GROUPED
from octavo.executor.native.formats import FORMATS as TILES
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.footprint import FLOATS, PACKED
from octavo.models.registry import build_programs
from octavo.quant.gguf import BLOCK_TYPES
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import each_family, tiny_model

NATIVE = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
FORMATS = [("auto", None), ("bfloat16", None), ("float32", None), ("auto", "int8")]


def decoder(family):
    checkpoint = open_checkpoint(tiny_model(family).path)
    return checkpoint, build_programs(checkpoint.config)["decoder"]


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("family", NATIVE)
def test_native(family, dtype, quantization):
    check_native(*decoder(family), dtype, quantization)


@pytest.mark.parametrize("num_layers", [1, 9])
@pytest.mark.parametrize("family", NATIVE)
def test_native_int4(family, num_layers):
    """The prediction holds where some matrices keep 8 bits, which depends on the layer."""
    layers = {"n_layer": num_layers} if family == "gpt2" else {"num_hidden_layers": num_layers}
    if family == "gemma3_text":
        layers["layer_types"] = (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
    checkpoint = open_checkpoint(tiny_model(family, **WIDTHS_OF_32[family], **layers).path)
    program = build_programs(checkpoint.config)["decoder"]
    check_native(checkpoint, program, "auto", "int4")
    for dtype in ("float32", "bfloat16"):
        check_native(checkpoint, program, dtype, "int4")


def check_native(checkpoint, program, dtype, quantization):
    backend = NativeBackend(BackendOptions(dtype=dtype, max_tokens=64))
    found = backend.footprint(program, loaded_formats(checkpoint, dtype, quantization, program))
    runnable = backend.prepare_program(
        program, WeightReader(checkpoint, dtype, quantization, program).load
    )
    assert sum(found.weight_bytes.values()) == runnable.weight_bytes
    assert found.kv_layouts == runnable.kv_layouts
    assert found.step_bytes >= 64 * 4 * 2 * 64, (
        "at least two rows of the hidden size for each token"
    )


@pytest.mark.parametrize(("dtype", "quantization"), [*FORMATS, ("float16", None), ("auto", "fp8")])
@pytest.mark.parametrize("family", each_family())
def test_torch(family, dtype, quantization):
    checkpoint, program = decoder(family)
    backend = TorchBackend(BackendOptions(dtype=dtype, max_tokens=64))
    found = backend.footprint(program, loaded_formats(checkpoint, dtype, quantization, program))
    runnable = backend.prepare_program(
        program, WeightReader(checkpoint, dtype, quantization, program).load
    )
    assert sum(found.weight_bytes.values()) == runnable.weight_bytes
    assert found.kv_layouts == runnable.kv_layouts


@pytest.mark.parametrize("family", each_family())
def test_reference(family):
    checkpoint, program = decoder(family)
    backend = ReferenceBackend()
    found = backend.footprint(program, loaded_formats(checkpoint, "auto", None, program))
    runnable = backend.prepare_program(program, WeightReader(checkpoint).load)
    assert sum(found.weight_bytes.values()) == runnable.weight_bytes
    assert found.kv_layouts == runnable.kv_layouts


def test_every_format_that_is_read_has_a_size():
    forms = {kind.form.partition(":")[0] for kind in BLOCK_TYPES.values()}
    assert {*TILES, *GROUPED, *FLOAT_CODES} >= forms and set(TILES) <= forms | {"I8"}
    assert {*FLOATS, *PACKED} == {*TILES, *GROUPED, *FLOAT_CODES}


def test_a_config_alone_says_the_same(tmp_path):
    checkpoint, program = decoder("llama")
    (tmp_path / "config.json").write_text((tiny_model("llama").path / "config.json").read_text())
    backend = NativeBackend(BackendOptions())
    for path in (tmp_path, tmp_path / "config.json"):
        header = open_header(path)
        assert build_programs(header.config)["decoder"] == program
        formats = [loaded_formats(one, "auto", "int8", program) for one in (header, checkpoint)]
        assert backend.footprint(program, formats[0]) == backend.footprint(program, formats[1])


def test_an_unknown_format_is_named():
    _, program = decoder("llama")
    with pytest.raises(UnsupportedModel, match="is stored as F8_E5M2, supported: F32, F16, BF16"):
        NativeBackend(BackendOptions()).footprint(program, lambda weight: "F8_E5M2")
