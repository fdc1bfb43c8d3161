"""Options: units, messages, and derived values."""

import pytest

from octavo.api.errors import ConfigError
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig, option_fields
from octavo.config.sizes import format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2147483648", 2**31),
        ("2GiB", 2**31),
        ("2G", 2**31),
        ("2GB", 2 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("500kb", None),
        ("-1", None),
    ],
)
def test_bytes(text, count):
    if count is None:
        with pytest.raises(
            ConfigError, match=r"kv_cache_memory_bytes: got .* expected a number of bytes such as"
        ):
            parse_bytes(text, name="kv_cache_memory_bytes")
    else:
        assert parse_bytes(text, name="x") == count


def test_counts():
    assert [parse_count(text, name="x") for text in ("8192", "8k", "8K", "1m")] == [
        8192,
        8000,
        8192,
        1_000_000,
    ]
    assert [format_bytes(count) for count in (5, 2048, 3 * 2**20, 2**31)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "2.0 GiB",
    ]


def test_flat_options_find_their_sections():
    config = EngineConfig.from_options(
        model="m", max_num_seqs=3, kv_cache_memory_bytes="1MiB", threads=2, max_model_len="4k"
    )
    assert (
        config.model.model,
        config.scheduler.max_num_seqs,
        config.cache.kv_cache_memory_bytes,
    ) == ("m", 3, 2**20)
    assert (config.backend.threads, config.model.max_model_len) == (2, 4000)
    assert EngineConfig.from_options(**config.to_options()) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 3}, "unknown option 'max_seqs'"),
        ({"dtype": "fp8"}, "dtype: got 'fp8', expected 'auto' or 'float32' or 'bfloat16'"),
        ({"threads": 0}, "threads: got 0, expected an integer of at least 1"),
        ({"threads": "two"}, "threads: got 'two', expected an integer of at least 1"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: got 1, expected True or False"),
        (
            {"max_num_seqs": 1 << 31},
            "max_num_seqs: got 2147483648, expected at most 2,147,483,647",
        ),
        ({"model": None}, "model: got None, expected a string"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(**options)
    assert message in str(error.value)


def test_every_option_has_a_help_text():
    assert all(entry.help for entry in option_fields().values())


def test_derived_values_fill_gaps_only():
    bare = derive(EngineConfig.from_options(model="m"), model_context_tokens=512, num_threads=3)
    assert (bare.model.max_model_len, bare.backend.threads, bare.model.served_model_name) == (
        512,
        3,
        "m",
    )
    assert bare.backend.backend == "native" and bare.scheduler.num_scheduler_steps == 8
    options = {
        "max_model_len": 100,
        "threads": 1,
        "served_model_name": "name",
        "backend": "torch",
        "device": "cpu",
    }
    given = EngineConfig.from_options(model="m", num_scheduler_steps=1, **options)
    assert derive(given, model_context_tokens=512, num_threads=3) == given


def test_several_decode_steps_are_the_native_backends():
    given = EngineConfig.from_options(num_scheduler_steps=3)
    assert derive(given, model_context_tokens=512, num_threads=3).scheduler.num_scheduler_steps == 3
    with pytest.raises(
        ConfigError, match="num_scheduler_steps: got 3, expected 1 with the backend torch"
    ):
        derive(given, model_context_tokens=512, num_threads=3, backend="torch")
    bare = derive(
        EngineConfig.from_options(), model_context_tokens=512, num_threads=3, backend="reference"
    )
    assert bare.scheduler.num_scheduler_steps == 1


def test_options_of_the_torch_backend_are_refused_elsewhere():
    given = EngineConfig.from_options(device="cpu")
    assert (
        derive(given, model_context_tokens=512, num_threads=1, backend="torch").backend.backend
        == "torch"
    )
    with pytest.raises(ConfigError, match="device: requires the torch backend, got 'native'"):
        derive(given, model_context_tokens=512, num_threads=1)
    for name, value in {
        "attention_backend": "triton",
        "torch_kernels": "plain",
        "enforce_eager": True,
    }.items():
        given = EngineConfig.from_options(**{name: value})
        derive(given, model_context_tokens=512, num_threads=1, backend="torch")
        with pytest.raises(ConfigError, match=f"{name}: requires the torch backend, got 'native'"):
            derive(given, model_context_tokens=512, num_threads=1)


def test_a_level_of_the_cpu_is_for_the_native_backend():
    given = EngineConfig.from_options(cpu_level="avx2")
    derive(given, model_context_tokens=512, num_threads=1)
    with pytest.raises(ConfigError, match="cpu_level: requires the native backend, got 'torch'"):
        derive(given, model_context_tokens=512, num_threads=1, backend="torch")
    with pytest.raises(ConfigError, match="cpu_level: got 'sse9'"):
        EngineConfig.from_options(cpu_level="sse9")


def test_a_stall_timeout_is_long_enough_to_see_anything_move():
    for value in (0, 1, 60):
        derive(
            EngineConfig.from_options(stall_timeout=value), model_context_tokens=512, num_threads=1
        )
    with pytest.raises(
        ConfigError, match=r"stall_timeout: got 0\.5, expected 0 \(off\) or at least 1 second"
    ):
        derive(
            EngineConfig.from_options(stall_timeout=0.5), model_context_tokens=512, num_threads=1
        )
