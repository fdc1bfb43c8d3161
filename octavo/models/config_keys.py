"""Tracks which config.json keys are read and which may be ignored.

An unknown key could change the model's results, so a value under a key that nothing reads raises
UnsupportedModel. Keys that do not affect the forward pass are listed here by reason. Source: the
configuration classes of transformers 4 and 5.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Set
from typing import Any

from octavo.api.errors import UnsupportedModel


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ORIGIN = _names("""
    _model_name_or_path _name_or_path architectures auto_map custom_pipelines finetuning_task
    language license license_link model_name name_or_path pipeline_tag tags task_specific_params
    transformers.js_config transformers_version transformers_weights unsloth_fixed
    unsloth_version
""")
"""Origin and authorship of the model."""

TRAINING = _names("""
    activation_dropout alpha_dropout attention_dropout attention_dropout_prob
    attention_probs_dropout_prob attn_dropout attn_pdrop aux_loss_alpha checkpoint_type
    classifier_dropout classifier_dropout_prob depth_scale dropout dropout_rate emb_pdrop
    embd_pdrop embedding_dropout embedding_dropout_prob expert_dropout feed_forward_dropout
    ffn_dropout ffn_pdrop gradient_checkpointing hidden_dropout hidden_dropout_prob init_std
    initializer_cutoff_factor initializer_factor initializer_range initializer_std
    input_jitter_noise label_smoothing layerdrop loss_type mlp_dropout mup_init
    output_router_logits pretraining_tp qa_dropout reorder_and_upcast_attn
    rescale_prenorm_residual resid_dropout resid_pdrop resid_prob_drop residual_dropout
    router_aux_loss_coef router_z_loss_coef seq_aux seq_classif_dropout
    summary_activation summary_first_dropout summary_hidden_size summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj upcast_attn use_aux_loss
""")
"""Training: dropout, initialization, losses, precision of individual matmuls, heads of other
tasks.
"""

GENERATION = _names("""
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_decoder_ids forced_eos_token_id length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
""")
"""Generation defaults that transformers 4 stored here; generation_config.json takes precedence."""

RUNTIME = _names("""
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _sliding_window_pattern attn_implementation attn_mode auto_fix bos_token_id
    cache_implementation chunk_size_feed_forward classifier_activation cls_token_id
    cross_attention_hidden_size eos_token_id experts_implementation flash_attention
    fuse_cross_entropy fuse_norm fused_feedforward fused_rms_norm id2label is_decoder
    is_llama_config keys_to_ignore_at_inference label2id mask_token_id max_batch_size
    num_labels output_attentions output_hidden_states output_past pad_token_id prefix
    problem_type pruned_heads return_dict sep_token_id sparse_prediction tf_legacy_loss
    tie_encoder_decoder tokenizer_class torchscript unk_token_id use_bfloat16 use_cache
    use_flash_attention_2 use_flash_attn use_fused_kernels use_return_dict use_sdpa
""")
"""Kernel and output options of other software, and token ids that the tokenizer defines."""

READ_ELSEWHERE = _names("""
    compression_config dtype has_own_head image_processor is_encoder_decoder is_matryoshka
    matryoshka_dimensions max_position_embeddings max_seq_len max_sequence_length model_max_length
    model_type n_ctx n_positions padded_vocab_size pooling quantization_config
    sbert_ce_default_activation_function sentence_transformers seq_length text_model_type
    torch_dtype vocab_size
""")
"""Keys read outside of the families: context, vocabulary, dtype and weight format, pooling and its
activation."""

TOWERS = _names("""
    audio_config audio_token_id audio_token_index boa_token_id boa_token_index boi_token_id
    boi_token_index eoa_token_id eoa_token_index eoi_token_id eoi_token_index image_token_id
    image_token_index video_token_id vision_config vision_end_token_id
    vision_soft_tokens_per_image vision_start_token_id
""")
"""Towers of multimodal models and their tokens, which have no effect on text."""

INERT = ORIGIN | TRAINING | GENERATION | RUNTIME | READ_ELSEWHERE


ROPE = _names("""
    attention_factor beta_fast beta_slow factor finetuned high_freq_factor llama_4_scaling_beta
    long_factor long_mscale low_freq_factor mrope_interleaved mrope_section mscale mscale_all_dim
    original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor
    short_mscale truncate type
""")
"""RoPE parameters. Each is read for some rope types and has no effect for others."""


class RecordedKeys(dict[str, Any]):
    """A config that records which keys were accessed."""

    asked: set[str]

    def __init__(self, values: Mapping[str, Any], asked: set[str] | None = None) -> None:
        """Accessed keys are added to the set `asked`."""
        super().__init__(values)
        if asked is None:
            asked = values.asked if isinstance(values, RecordedKeys) else set()
        self.asked = asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def unread(config: Mapping[str, Any], asked: Set[str]) -> Iterator[str]:
    """Yields the keys that were not accessed and might change results.

    Null and false are ignored: they disable a feature.
    """
    for key, value in config.items():
        if key not in asked and key not in INERT and value is not None and value is not False:
            yield key


def refuse_unread(config: Mapping[str, Any], asked: Set[str]) -> None:
    """Raises UnsupportedModel if a key was not accessed and might change results."""
    names = list(unread(config, asked))
    if not names:
        return
    shown = ", ".join(f"{name} = {config[name]!r:.60}" for name in names[:5])
    near = difflib.get_close_matches(names[0], asked, 1)
    raise UnsupportedModel(
        f"config.json: {shown} is unknown for {config['model_type']} and could change its results",
        hint=f"did you mean {near[0]}?" if near else "remove it if the model does not need it",
    )
