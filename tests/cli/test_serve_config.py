"""The models that `octavo serve` is given, by its arguments and by its configuration file."""

import pytest

from octavo.api.errors import ConfigError
from octavo.cli.common.serve_config import MAX_FILE_BYTES, ServeConfig, read_config
from octavo.server.state.model_spec import name_and_model

FILE = """
port: 8123
api-key: [one, two]
operator_key: boss
lenient: true
max-num-seqs: 32
kv-cache-memory-bytes: 2GiB
models:
  - smollm2
  - large=./checkpoints/large
  - name: small
    model: gemma3-270m
    max-model-len: 4k
    max-num-seqs: 4
"""


@pytest.fixture
def read(tmp_path):
    """Reads a configuration file of this text."""

    def read(text):
        path = tmp_path / "octavo.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_config(path)

    return read


def options_by_name(specs):
    return {spec.name: spec.options for spec in specs}


def test_a_file_says_settings_options_and_models(read):
    config = read(FILE)
    assert config.settings == {
        "port": 8123,
        "api_key": ("one", "two"),
        "operator_key": "boss",
        "lenient": True,
    }
    found = options_by_name(config.specs([], {}))
    assert list(found) == ["smollm2", "large", "small"]
    assert found["large"]["model"] == "./checkpoints/large"
    assert found["smollm2"]["kv_cache_memory_bytes"] == 2 << 30
    assert [options["max_num_seqs"] for options in found.values()] == [32, 32, 4]
    assert found["small"]["max_model_len"] == 4000
    assert config.engine_defaults({}) == {"max_num_seqs": 32, "kv_cache_memory_bytes": 2 << 30}


def test_the_command_line_wins(read):
    config = read(FILE)
    found = options_by_name(config.specs([], {"max_num_seqs": 8}))
    assert [options["max_num_seqs"] for options in found.values()] == [8, 8, 8]
    assert config.engine_defaults({"max_num_seqs": 8})["max_num_seqs"] == 8


def test_models_of_the_command_line_replace_those_of_the_file(read):
    """A name of the file picks its entry with its options."""
    found = options_by_name(read(FILE).specs(["small", "other=smollm2"], {}))
    assert list(found) == ["small", "other"]
    assert found["small"]["max_model_len"] == 4000 and found["small"]["model"] == "gemma3-270m"
    assert "max_model_len" not in found["other"]


def test_without_a_file_the_default_model_is_served():
    (spec,) = ServeConfig().specs([], {"threads": 1})
    assert spec.name == spec.model == "smollm2" and spec.options["threads"] == 1
    (spec,) = ServeConfig().specs(["smollm2"], {"served_model_name": "mine"})
    assert spec.name == "mine" and spec.model == "smollm2"


def test_a_file_that_has_an_equals_sign_in_its_name_is_a_model(tmp_path):
    file = tmp_path / "a=b.gguf"
    assert name_and_model(f"x={file}") == ("x", str(file))
    assert name_and_model("a=b=c") == ("a", "b=c")
    assert name_and_model("org/model") == (None, "org/model")
    file.touch()
    assert name_and_model(str(file)) == (None, str(file))


@pytest.mark.parametrize(
    ("texts", "given", "message"),
    [
        (["a=smollm2", "a=gemma3-270m"], {}, "two models are named a"),
        (["smollm2", "smollm2"], {}, "two models are named smollm2"),
        (["a=x", "b=y"], {"served_model_name": "c"}, "served_model_name: allowed with one model"),
    ],
)
def test_names_that_cannot_be_are_refused(texts, given, message):
    with pytest.raises(ConfigError, match=message):
        ServeConfig().specs(texts, given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", r"unknown key 'prot'\nhint: did you mean port\?"),
        ("model: smollm2", r"unknown key 'model'\nhint: did you mean models\?"),
        ("max-model-len: lots", "max_model_len: got 'lots', expected"),
        ("port: [1]", r"port: got \(1,\), expected an integer"),
        ("lenient: 3", "lenient: got 3, expected True or False"),
        ("port: 1\nport: 2", r"octavo.yaml:2:1: not valid YAML: the key 'port' occurs twice"),
        ("- a\n- b", "octavo.yaml:1:1: got a list, expected a mapping"),
        ("a: [", r"octavo.yaml:1:5: not valid YAML: while parsing a flow node"),
        (b"ok: 1\n \xff", "octavo.yaml:2:2: got a byte that is not UTF-8"),
        ("models: smollm2", "models: got 'smollm2', expected a list of models"),
        ("port: 1\nmodels: []", r"octavo.yaml:2:1: models: got \[\], expected a list of models"),
        ("models: [3]", r"models\[0\]: got 3, expected a model or a mapping"),
        ("models: [{name: a}]", r"models\[0\]: model: field required"),
        ("models: [{model: a, port: 3}]", r"octavo.yaml:1:21: unknown key 'port'"),
        ("models: [{model: a, thread: 3}]", r"unknown key 'thread'\nhint: did you mean threads\?"),
        (
            "key: !!python/object/apply:os.system [x]",
            "octavo.yaml:1:6: not valid YAML: could not determine",
        ),
        ("a" * (MAX_FILE_BYTES + 1), "too large, expected"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_an_empty_file_says_nothing(read):
    assert read("") == read("# nothing\n") == ServeConfig()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"config: .*none.yaml: cannot be read"):
        read_config(tmp_path / "none.yaml")
