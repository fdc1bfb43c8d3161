"""GGUF headers of encoders and of T5.

An architecture may stand for several families: "bert" is BERT, DistilBERT, RoBERTa or XLM-R; for
the last two the converter removes the unused first positions. Source: as in `gguf_families.py`.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.gguf.gguf_family import Config, Family, Header

POOLING_MODES = {1: "mean", 2: "cls", 3: "last"}
"""Pooling modes by llama.cpp's numbers; 0 is none, 4 is a classifier's."""
FIRST_POSITION_ID = -1
"""Padding id that makes RoBERTa's positions start at row 0 of their table."""
MODERNBERT_PERIOD = 3
"""Default period of layers with full attention."""
T5_MAX_DISTANCE = 128
T5_BUCKETS = 32


def pooling_config(header: Header) -> Config:
    """Returns the pooling specified by the header; {} if there is none. llama.cpp always normalizes
    pooled embeddings.
    """
    kind = header.get("pooling_type")
    if kind is None or kind == 0:
        return {}
    if kind not in POOLING_MODES:
        raise UnsupportedModel(
            f"{header.file.path}: pooling_type is {kind!r}, supported in GGUF:"
            f" {', '.join(map(str, POOLING_MODES))} ({', '.join(POOLING_MODES.values())})"
        )
    return {"pooling": {"mode": POOLING_MODES[kind], "normalize": True}}


def _encoder_config(header: Header) -> Config:
    return {
        "hidden_size": header.count("embedding_length"),
        "intermediate_size": header.count("feed_forward_length"),
        "num_hidden_layers": header.num_blocks(),
        "num_attention_heads": header.count("attention.head_count"),
        "max_position_embeddings": header.count("context_length"),
    }


def bert_config(header: Header) -> Config:
    segments = header.file.tensors.get("token_types.weight")
    positions = header.file.tensors.get("position_embd.weight")
    return _encoder_config(header) | {
        "architectures": ["BertModel"],
        "layer_norm_eps": header.number("attention.layer_norm_epsilon"),
        "type_vocab_size": 0 if segments is None else segments.shape[0],
        "max_position_embeddings": header.count("context_length")
        if positions is None
        else positions.shape[0],
        "hidden_act": "gelu",
    }


def roberta_classifier_config(header: Header) -> Config:
    return bert_config(header) | {
        "architectures": ["RobertaForSequenceClassification"],
        "num_labels": header.num_rows("cls.output.weight"),
        "pad_token_id": FIRST_POSITION_ID,
    }


def nomic_bert_config(header: Header) -> Config:
    return bert_config(header) | {
        "architectures": ["NomicBertModel"],
        "rope_theta": float(header.number("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
    }


def modernbert_config(header: Header) -> Config:
    epsilon = header.get("attention.layer_norm_epsilon")
    return _encoder_config(header) | {
        "architectures": ["ModernBertModel"],
        "norm_eps": header.number("attention.layer_norm_rms_epsilon", epsilon),
        "local_attention": header.count("attention.sliding_window"),
        "global_attn_every_n_layers": header.count(
            "attention.sliding_window_pattern", MODERNBERT_PERIOD
        ),
        "global_rope_theta": float(header.number("rope.freq_base", 160_000.0)),
        "local_rope_theta": float(header.number("rope.freq_base_swa", 10_000.0)),
        "hidden_activation": header.get("hidden_activation", "gelu"),
        "attention_bias": header.has("blk.0.attn_qkv.bias"),
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
        "norm_bias": header.has("blk.0.ffn_norm.bias"),
    }


def modernbert_classifier_config(header: Header) -> Config:
    return modernbert_config(header) | {
        "architectures": ["ModernBertForSequenceClassification"],
        "num_labels": header.num_rows("cls.output.weight"),
        "classifier_bias": header.has("cls.bias"),
        "classifier_pooling": "cls",
    }


def t5_config(header: Header) -> Config:
    """Returns the config of a T5.

    Headers do not say whether the last hidden states are scaled; they are if the output layer is
    tied to the embeddings.
    """
    encoders = header.num_blocks("enc.blk")
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": header.count("embedding_length"),
        "d_kv": header.count("attention.key_length"),
        "d_ff": header.count("feed_forward_length"),
        "num_layers": encoders,
        "num_decoder_layers": header.num_blocks("dec.blk", _decoder_blocks(header)),
        "num_heads": header.count("attention.head_count"),
        "n_positions": header.count("context_length"),
        "relative_attention_num_buckets": header.count(
            "attention.relative_buckets_count", T5_BUCKETS
        ),
        "relative_attention_max_distance": T5_MAX_DISTANCE,
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if header.has("enc.blk.0.ffn_gate.weight") else "relu",
        "scale_decoder_outputs": not header.has("output.weight"),
        "decoder_start_token_id": header.number("decoder_start_token_id", 0),
    }


def _decoder_blocks(header: Header) -> str:
    """Returns the key of the decoder's number of layers; the encoder's if it is missing."""
    key = "decoder_block_count"
    return "block_count" if header.get(key) is None else key


_BERT = Family(
    "bert",
    bert_config,
    {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    },
    {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    layer_prefix="encoder.layer",
    affixes="around",
)
_ROBERTA_CLASSIFIER = replace(
    _BERT,
    model_type="roberta",
    config=roberta_classifier_config,
    tensors={stem: f"roberta.{name}" for stem, name in _BERT.tensors.items()}
    | {"cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    layer_prefix="roberta.encoder.layer",
)
_MODERNBERT = Family(
    "modernbert",
    modernbert_config,
    {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
    },
    {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    layer_prefix="layers",
    affixes="around",
)
_T5_ATTENTION = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_o": "o"}
_T5_MLP = {"ffn_gate": "wi_0", "ffn_up": "wi_1", "ffn_down": "wo"}


def _t5_layers(mlp: dict[str, str]) -> dict[str, str]:
    """Returns the tensor names of a T5's layers; `mlp` has those of the feed-forward module."""

    def sublayer(prefix: str, index: int, module: str, names: dict[str, str]) -> dict[str, str]:
        return {f"{prefix}{stem}": f"layer.{index}.{module}.{to}" for stem, to in names.items()}

    cross = {f"cross_{stem}": name for stem, name in _T5_ATTENTION.items()}
    bias = {"attn_rel_b": "relative_attention_bias"}
    found = {"enc.attn_norm": "layer.0.layer_norm", "enc.ffn_norm": "layer.1.layer_norm"}
    found |= {"dec.attn_norm": "layer.0.layer_norm", "dec.cross_attn_norm": "layer.1.layer_norm"}
    found |= {"dec.ffn_norm": "layer.2.layer_norm"}
    for prefix, last in (("enc.", 1), ("dec.", 2)):
        found |= sublayer(prefix, 0, "SelfAttention", _T5_ATTENTION | bias)
        found |= sublayer(prefix, last, "DenseReluDense", mlp)
    return found | sublayer("dec.", 1, "EncDecAttention", cross)


_T5 = Family(
    "t5",
    t5_config,
    {
        "token_embd": "shared",
        "enc.output_norm": "encoder.final_layer_norm",
        "dec.output_norm": "decoder.final_layer_norm",
        "output": "lm_head",
    },
    _t5_layers({"ffn_up": "wi", "ffn_down": "wo"}),
    stacks={"enc.": "encoder.block", "dec.": "decoder.block"},
    affixes="behind",
)

ENCODER_FAMILIES: dict[str, Family] = {
    "bert": replace(
        _BERT,
        variants=(
            (lambda header: header.has("cls.weight", "cls.output.weight"), _ROBERTA_CLASSIFIER),
        ),
    ),
    "nomic-bert": Family(
        "nomic_bert",
        nomic_bert_config,
        {
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
        },
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        layer_prefix="encoder.layers",
        affixes="around",
    ),
    "modern-bert": replace(
        _MODERNBERT,
        variants=(
            (
                lambda header: header.has("cls.output.weight"),
                replace(
                    _MODERNBERT,
                    config=modernbert_classifier_config,
                    tensors={stem: f"model.{name}" for stem, name in _MODERNBERT.tensors.items()}
                    | {"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"},
                    layer_prefix="model.layers",
                ),
            ),
        ),
    ),
    "t5": replace(
        _T5,
        variants=(
            (
                lambda header: header.has("enc.blk.0.ffn_gate.weight"),
                replace(_T5, layer_tensors=_t5_layers(_T5_MLP)),
            ),
        ),
    ),
}
