"""A config.json reads alike in old and new spelling; what no op can honour is refused by name."""

import pytest

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.open import open_header
from octavo.models.hf_config import HfConfig, model_info
from octavo.models.registry import FAMILIES, build_programs
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Attention, Rope
from tests.support.chatglm import chatglm_config
from tests.support.every_family import tiny_of
from tests.support.tiny_encoders import ENCODERS, encoder_config
from tests.support.tiny_models import tiny_model

YARN = {
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def old_spelling(config):
    """Rewrites a config as transformers 4 wrote it."""
    old = {
        name: value
        for name, value in config.items()
        if name not in ("rope_parameters", "dtype", "layer_types")
    }
    old["torch_dtype"] = config["dtype"]
    rope = dict(config["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope["type"] == "default" else rope
    return old


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen2_moe", "gpt_oss", "deepseek_v3"]
)
@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
        {"rope_type": "yarn"} | YARN,
    ],
)
def test_old_and_new_keys_build_the_same_program(family, rope):
    config = tiny_model(family, **({"rope_parameters": rope} if rope else {})).config
    assert build_programs(old_spelling(config)) == build_programs(config)


def test_old_gemma3_scales_the_full_layers_only():
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layer_types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    new = tiny_model("gemma3_text", rope_parameters=rope, layer_types=layer_types).config
    old = {
        name: value
        for name, value in new.items()
        if name not in ("rope_parameters", "layer_types", "_sliding_window_pattern")
    }
    old |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert build_programs(old | {"sliding_window_pattern": 3}) == build_programs(new)


def test_windows_have_a_cache_group_of_their_own():
    program = build_programs(tiny_model("gemma3_text").config)["decoder"]
    assert [(group.kind, group.num_layers, group.window) for group in program.groups] == [
        ("full", 1, None),
        ("window", 3, 24),
    ]
    layers = [
        (op.group, op.layer, op.mask, op.window) for op in program.ops if isinstance(op, Attention)
    ]
    assert layers == [
        ("window", 0, "window", 24),
        ("window", 1, "window", 24),
        ("full", 0, "causal", None),
        ("window", 2, "window", 24),
    ]


def test_experts_are_read_one_tensor_each():
    program = build_programs(tiny_model("qwen2_moe").config)["decoder"]
    weight = next(op.weight for op in program.ops if isinstance(op, GroupedLinear))
    assert weight.shape == (6, 36, 56)
    assert weight.tensor_names[5] == "model.layers.0.mlp.experts.5.gate_proj.weight"


def test_tied_heads_are_the_embedding():
    tied = build_programs(tiny_model("llama", tie_word_embeddings=True).config)["decoder"]
    assert tied.ops[-1].weights == (tied.ops[0].table,)
    own = build_programs(tiny_model("llama").config)["decoder"]
    assert own.ops[-1].weights[0].name == "lm_head.weight"


REFUSED = [
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope type dynamic needs the number factor, got None",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope type longrope needs short_factor, a list of 8 numbers",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "spiral"}},
        "rope type 'spiral' is not supported, known are default, lin",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear"}},
        "rope type linear needs the number factor, got None",
    ),
    ("llama", {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish', supported: silu"),
    ("llama", {"hidden_size": None}, "hidden_size is missing, llama needs it"),
    ("llama", {"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
    (
        "llama",
        {"num_hidden_layers": 1 << 31},
        "num_hidden_layers is 2147483648, expected an integer from 1 to 10,000",
    ),
    ("llama", {"head_dim": 0}, "head_dim is 0, expected an integer from 1 to 1,048,576"),
    (
        "qwen3",
        {"head_dim": 11},
        "11 rotary dims of head size 11, expected an even number",
    ),
    (
        "deepseek_v3",
        {"qk_rope_head_dim": 7},
        "7 rotary dims of head size 7, expected an even number",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "factor is 0.0, expected a number above 0",
    ),
    ("llama", {"rope_parameters": 3}, "rope_parameters is 3, expected an object"),
    ("gpt2", {"n_head": 5}, "n_embd 72 is not a multiple of n_head 5"),
    (
        "llama",
        {"num_key_value_heads": 3},
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    (
        "qwen2",
        {"layer_types": ["full_attention", "linear_attention"]},
        "layer_types is 'linear_attention'",
    ),
    (
        "qwen2",
        {"layer_types": ["full_attention"]},
        "layer_types is '1 layers', expected a list of 2",
    ),
    (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4096},
        "sliding_window is 4096",
    ),
    (
        "llama4_text",
        {"layer_types": ["sliding_attention"] * 4},
        "expected 4 entries from chunked_attention, full_attention",
    ),
    (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0, supported: null for gemma3_text",
    ),
    (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is True, supported: False",
    ),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "scoring_func is 'softmax', supported: 'sigmoid'",
    ),
    ("t5", {"feed_forward_proj": "gated-gelu-x"}, "feed_forward_proj"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1, supported: 1e-12"),
    (
        "mixtral",
        {"num_experts_per_tok": 6},
        "5 experts, with top-6 routing; expected at most 5",
    ),
    ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups of different sizes"),
    (
        "nemotron_h",
        {"n_group": 5, "topk_group": 6},
        "5 experts in 5 groups, with 6 groups per token; expected at most 5",
    ),
    (
        "glm4_moe",
        {"topk_group": 1},
        "8 experts, with top-3 routing in 1 of 4 groups; these have 2",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModel) as error:
        build_programs({**tiny_model(family).config, **changes})
    assert message in str(error.value)


DAMAGE = [
    0,
    -1,
    1,
    10**9,
    2**70,
    1.5,
    float("nan"),
    "x",
    [],
    [1],
    {"a": 1},
    True,
    {"rope_type": "yarn", "factor": 2},
    {"rope_type": 5},
]


def config_of(family):
    """Returns the config.json of a tiny model of the family."""
    if family == "chatglm":
        return chatglm_config(tiny_model("glm").config)
    if family in (*ENCODERS, "new"):
        return encoder_config(family)
    return open_header(tiny_of(family).path).config


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_damaged_value_does_worse_than_being_refused(family):
    """A damaged value is refused or harmless: no other error, and no endless Program."""
    config = config_of(family)
    for key in [
        *config,
        "rope_scaling",
        "sliding_window",
        "layer_types",
        "n_inner",
        "rope_theta",
        "eos_token_id",
    ]:
        for value in DAMAGE:
            try:
                model_info({**config, key: value})
                build_programs({**config, key: value})
            except UnsupportedModel:
                continue


def test_a_bound_on_projections_is_above_zero():
    config = tiny_model("olmoe").config
    with pytest.raises(UnsupportedModel, match=r"clip_qkv is -8.0, expected a number above 0"):
        build_programs({**config, "clip_qkv": -8.0})


def test_qwen3_moe_counts_its_experts_under_either_name():
    config = dict(tiny_model("qwen3_moe").config)
    count = config.pop("num_experts", None) or config.pop("num_local_experts")
    config.pop("num_local_experts", None)
    programs = [
        build_programs({**config, name: count}) for name in ("num_experts", "num_local_experts")
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vocabulary_of_a_config_is_its_programs(family):
    config = config_of(family)
    for name, program in build_programs(config).items():
        # Programs of an image's rows read no tokens.
        wanted = model_info(config).vocab_size if name in ("decoder", "encoder") else 0
        assert program.vocab_size == wanted


def test_unknown_family_lists_the_known():
    with pytest.raises(UnsupportedModel) as error:
        build_programs({"model_type": "rwkv"})
    assert str(error.value).startswith("model type 'rwkv' is not supported\nhint: known are ")
    assert all(family in str(error.value) for family in FAMILIES)
    with pytest.raises(UnsupportedModel, match="model_type is missing"):
        build_programs({})


def test_model_info():
    config = {
        "model_type": "gpt2",
        "n_positions": 1024,
        "vocab_size": 9,
        "eos_token_id": 3,
        "torch_dtype": "bfloat16",
    }
    info = model_info(config, {"eos_token_id": [4, 5], "bos_token_id": None})
    assert (info.max_context_tokens, info.eos_token_ids, info.dtype, info.bos_token_id) == (
        1024,
        (4, 5, 3),
        "bfloat16",
        None,
    )
    assert model_info(config).eos_token_ids == (3,)
    with pytest.raises(UnsupportedModel, match="dtype is 'float8'"):
        model_info(config | {"torch_dtype": "float8"})
    t5 = model_info(tiny_model("t5").config)
    assert t5.is_encoder_decoder and t5.max_context_tokens == 512


def test_null_counts_as_missing():
    assert HfConfig({"x": None}).integer("x", 4) == 4
    assert HfConfig({"x": None}).optional_number("x") is None


def test_rope_covers_the_rotary_columns_only():
    program = build_programs(tiny_model("deepseek_v3").config)["decoder"]
    ropes = [op for op in program.ops if isinstance(op, Rope)]
    assert {(op.num_heads, op.rotary_dim, op.style) for op in ropes} == {
        (4, 8, "interleaved"),
        (1, 8, "interleaved"),
    }


def test_the_context_goes_on_where_queries_grow_and_chunks_follow():
    """Longrope has other factors beyond the original context."""
    lists = {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}
    base = {"model_type": "phi3", "vocab_size": 10, "max_position_embeddings": 4096}
    original = {"original_max_position_embeddings": 512}
    for config, wanted in (
        (base | original | {"rope_scaling": lists}, 4096),
        (base | {"rope_parameters": lists | original}, 4096),
        (base | {"attention_chunk_size": 1024, "floor_scale": 600}, 4096),
        (base | {"rope_parameters": original | {"llama_4_scaling_beta": 0.1}}, 4096),
    ):
        assert model_info(config).max_context_tokens == wanted


def test_what_newer_files_say_of_t5s_activation_wins():
    config = tiny_model("t5").config
    own = {"dense_act_fn": "silu", "is_gated_act": True}
    derived = {"feed_forward_proj": "gated-silu", "dense_act_fn": None, "is_gated_act": None}
    assert build_programs(config | own) == build_programs(config | derived)


PHI3 = {
    "model_type": "phi3",
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_early_names_of_longrope(name):
    lists = {"short_factor": [1.5] * 8, "long_factor": [2] * 8}
    config = PHI3 | {"original_max_position_embeddings": 512}
    assert build_programs(config | {"rope_scaling": {"type": name, **lists}}) == build_programs(
        config | {"rope_scaling": {"type": "longrope", **lists}}
    )


def test_the_context_before_longrope_stands_beside_its_factors():
    """It wins over the one among them, as in transformers."""
    lists = {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}
    among = lists | {"original_max_position_embeddings": 64}
    beside = PHI3 | {"original_max_position_embeddings": 512}
    assert build_programs(beside | {"rope_scaling": among}) == build_programs(
        beside | {"rope_scaling": lists}
    )


def test_one_set_of_rope_parameters_for_layers_of_two_kinds():
    config = PHI3 | {"model_type": "gemma3_text", "rope_parameters": {"factor": 8.0}}
    with pytest.raises(UnsupportedModel, match="factor for all layers, expected one set for"):
        build_programs(config)


def test_modernbert_scales_the_ropes_of_all_layers():
    config = encoder_config("modernbert")
    bases = {kind: rope["rope_theta"] for kind, rope in config.pop("rope_parameters").items()}
    scaling = {"rope_type": "linear", "factor": 3.0}
    by_type = {kind: scaling | {"rope_theta": theta} for kind, theta in bases.items()}
    old = {"local_rope_theta": bases["sliding_attention"], "rope_scaling": scaling}
    old["global_rope_theta"] = bases["full_attention"]
    assert build_programs(config | old) == build_programs(config | {"rope_parameters": by_type})


@pytest.mark.parametrize("num_dense", [0, 2])
def test_widths_that_no_layer_has_are_accepted(num_dense):
    """A model without dense layers may have `intermediate_size` in its config, and vice versa."""
    config = config_of("deepseek_v3") | {"first_k_dense_replace": num_dense}
    build_programs(config | {"intermediate_size": 48}, every_key=True)
