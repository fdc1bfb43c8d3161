"""Programs derived from transformers' code: equal to transformers, or rejected; never wrong."""

from dataclasses import replace

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import UnsupportedModel
from octavo.derive import model_hooks
from octavo.derive.capture import make_config
from octavo.derive.derive import derive, lower, store
from octavo.derive.verify import TOLERANCE, compare, num_layers_with_each_kind, shrink, verify
from octavo.models.derived import program_path
from octavo.program.expert_ops import Route
from octavo.program.ops import (
    ActMul,
    Attention,
    LayerNorm,
    Linear,
    RmsNorm,
    Rope,
    Scale,
    SoftCap,
)
from tests.support.tiny_models import FAMILIES, tiny_model

DERIVED = (
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "phi", "phi3"),
    *("qwen2_moe", "mixtral", "qwen3_moe", "olmoe", "glm4_moe", "ernie4_5_moe"),
    *("glm", "glm4", "opt", "gpt_neox", "gpt_bigcode", "stablelm", "starcoder2", "nemotron"),
    *("olmo", "olmo2", "olmo3", "granite", "smollm3", "cohere", "cohere2", "internlm3"),
    *("exaone4", "seed_oss", "deepseek_v3", "gpt_oss", "gptj"),
    *("granitemoe", "lfm2", "ministral3", "mpt"),
)
"""Families with a module here that can be derived, too."""
REJECTED = {
    "bloom": "aten.add",  # an activation with rounded constants
    "mamba": "aten.matmul",
    "gemma3n_text": "an embedding of something",
}
"""Families that cannot, and what the error names."""
QUICK = ("llama", "gemma2", "qwen2_moe", "cohere2", "gpt2", "glm4_moe", "deepseek_v3", "gpt_oss")
"""Families that have every part between them."""

UNKNOWN = {
    "model_type": "arcee",
    "architectures": ["ArceeForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 300,
    "rms_norm_eps": 1e-5,
}
"""A config of a model type without a module here."""


def each(families):
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in families
    ]


@pytest.mark.parametrize("family", each(DERIVED))
def test_a_derived_program_gives_the_logits_of_transformers(family):
    config = tiny_model(family).config
    assert compare(lower(config), config) <= TOLERANCE


@pytest.mark.parametrize("family", REJECTED)
def test_what_programs_cannot_express_is_rejected_by_name(family):
    with pytest.raises(UnsupportedModel, match=REJECTED[family]):
        lower(tiny_model(family).config)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*DERIVED} - {*REJECTED}))
def test_no_other_family_is_derived_wrongly(family):
    config = tiny_model(family).config
    try:
        program = lower(config)
    except UnsupportedModel:
        return
    assert compare(program, config) <= TOLERANCE


# -- the check notices every change ----------------------------------------------------------------


def without_bias(op):
    return replace(op, biases=())


def slower(op):
    table = replace(op.table, inv_freq=tuple(each * 1.001 for each in op.table.inv_freq))
    return replace(op, table=table)


def narrower(op):
    table = replace(op.table, inv_freq=op.table.inv_freq[:-1])
    return replace(op, rotary_dim=op.rotary_dim - 2, table=table)


CHANGES = [
    ("llama", RmsNorm, lambda op: replace(op, eps=op.eps * 2)),
    ("llama", RmsNorm, lambda op: replace(op, weight_offset=1e-6)),
    ("llama", Attention, lambda op: replace(op, scale=op.scale * 1.0001)),
    ("llama", Rope, slower),
    ("llama", Rope, lambda op: replace(op, style="interleaved")),
    ("llama", Rope, narrower),
    ("llama", Rope, lambda op: replace(op, table=replace(op.table, mscale=1.001))),
    ("llama", ActMul, lambda op: replace(op, activation="gelu_tanh")),
    ("llama", ActMul, lambda op: replace(op, gate=op.up, up=op.gate)),
    ("gemma2", RmsNorm, lambda op: replace(op, weight_offset=0.0)),
    ("gemma2", Attention, lambda op: replace(op, softcap=None)),
    ("gemma2", Attention, lambda op: replace(op, mask="causal", window=None)),
    ("gemma2", SoftCap, lambda op: replace(op, cap=op.cap + 0.1)),
    ("gemma2", Scale, lambda op: replace(op, factor=op.factor * 1.0001)),
    ("gpt2", LayerNorm, lambda op: replace(op, bias=None)),
    ("gpt2", LayerNorm, lambda op: replace(op, eps=op.eps * 10)),
    ("gpt2", Linear, without_bias),
    ("glm4_moe", Route, lambda op: replace(op, bias=None)),
    ("glm4_moe", Route, lambda op: replace(op, scale=op.scale * 1.001)),
    ("glm4_moe", Route, lambda op: replace(op, score="softmax")),
    ("qwen2_moe", Route, lambda op: replace(op, normalize=not op.normalize)),
    ("qwen2_moe", Route, lambda op: replace(op, top_k=op.top_k - 1)),
    ("qwen2_moe", Route, lambda op: replace(op, score="sigmoid")),
    ("gpt_oss", Attention, lambda op: replace(op, sinks=None)),
    ("gpt_oss", ActMul, lambda op: replace(op, alpha=op.alpha + 0.001)),
    ("gpt_oss", ActMul, lambda op: replace(op, up_offset=0.0)),
    ("gpt_oss", ActMul, lambda op: replace(op, clamp=op.clamp + 0.1)),
    ("mpt", Attention, lambda op: replace(op, bias=None)),
    ("cohere2", Attention, lambda op: replace(op, window=op.window and op.window - 1)),
]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("case", range(len(CHANGES)))
def test_the_check_notices_a_changed_attribute(case):
    family, kind, change = CHANGES[case]
    config = tiny_model(family).config
    program = lower(config)
    at, new = next(
        (index, change(op))
        for index, op in enumerate(program.ops)
        if isinstance(op, kind) and change(op) != op
    )
    if kind is Route and new.top_k != program.ops[at].top_k:
        ids, weights = (replace(out, width=new.top_k) for out in new.outs[1:])
        changed = {new.outs[1]: ids, new.outs[2]: weights}
        ops = tuple(op.on(changed) for op in (*program.ops[:at], new, *program.ops[at + 1 :]))
    else:
        ops = (*program.ops[:at], new, *program.ops[at + 1 :])
    with pytest.raises(UnsupportedModel, match=r"differ|does not read"):
        verify(replace(program, ops=ops), config)


def test_a_bidirectional_model_is_rejected_as_a_decoder():
    config = {
        **{key: UNKNOWN[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
        "model_type": "bert-generation",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "is_decoder": False,
    }
    with pytest.raises(UnsupportedModel, match=r"bert-generation.*cannot be derived"):
        derive(make_config(config).to_dict(), lambda _line: None)


# -- from an unknown type to tokens ----------------------------------------------------------------


@pytest.fixture
def unknown(tmp_path, monkeypatch):
    """The directory of a model whose type has no module, with a cache of Programs of its own."""
    import json

    import torch
    import transformers

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(UNKNOWN)).eval()
    model.save_pretrained(path)
    return path, json.loads((path / "config.json").read_text()), model


def test_a_model_of_an_unknown_type_generates_what_transformers_does(unknown):
    import torch

    path, config, model = unknown
    llm = LLM(str(path), backend="reference", skip_tokenizer_init=True, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.0)
    prompt = [5, 6, 7, 8, 9]
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert list(output.outputs[0].token_ids) == ids[len(prompt) :]
    assert program_path(config).is_file()


def test_a_stored_program_is_used_without_torch(unknown, monkeypatch):
    path, config, _ = unknown
    store(derive(config, lambda _line: None), config)
    monkeypatch.setattr(model_hooks, "NEEDED", ("a_package_that_is_not_installed",))
    llm = LLM(str(path), backend="native", skip_tokenizer_init=True, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert llm.generate({"prompt_token_ids": [5, 6]}, params)[0].outputs[0].token_ids


def test_the_missing_extra_is_named(unknown, monkeypatch):
    monkeypatch.setattr(model_hooks, "NEEDED", ("a_package_that_is_not_installed",))
    with pytest.raises(UnsupportedModel, match=r"arcee.*requires a_package_that_is") as raised:
        LLM(str(unknown[0]), skip_tokenizer_init=True)
    assert "octavo[derive]" in str(raised.value.hint)


def test_a_type_that_transformers_does_not_know_is_rejected():
    with pytest.raises(UnsupportedModel, match="does not know it"):
        lower({**UNKNOWN, "model_type": "no_such_model"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, expected at most"),
        ({"hidden_size": 10**9}, "hidden_size: got 1000000000"),
        ({"hidden_size": 63}, "arcee"),
        ({"num_attention_heads": 0}, "arcee"),
        ({"model_type": "qwen3_vl", "text_config": {}}, "qwen3_vl"),
        ({"model_type": "arcee" * 100}, "does not know it"),
    ],
)
def test_configs_that_make_no_sense_are_rejected(change, named):
    with pytest.raises(UnsupportedModel, match=named):
        derive({**UNKNOWN, **change}, lambda _line: None)


def test_the_check_covers_each_kind_of_layer():
    config = tiny_model("gemma3_text").config
    program = lower(config)
    count = num_layers_with_each_kind(program, config)
    small = shrink(config, count)
    masks = {op.mask for op in program.ops if isinstance(op, Attention)}
    assert {op.mask for op in lower(small).ops if isinstance(op, Attention)} == masks
    assert len(small["layer_types"]) == count
