"""Opens a draft model and checks that its vocabulary equals the target's.

Uses headers and tokenizers; the Program is loaded with the target's (`octavo/wiring/model.py`).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import ConfigError
from octavo.config.config_hooks import config_hooks
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.original_context import ONE_CONTEXT
from octavo.executor.base import Footprint
from octavo.program.ops import original_context
from octavo.program.program import Program
from octavo.text.ports import Tokenizer


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """Returns the config of the draft model; None without one."""
    name = config.scheduler.spec_model
    if name is None or config.scheduler.spec_method != "draft_model":
        return None
    model = replace(
        config.model,
        model=name,
        served_model_name=None,
        tokenizer=None,
        chat_template=None,
        enable_prompt_embeds=False,
    )
    scheduler = replace(config.scheduler, spec_method="none", spec_model=None, spec_tree_width=1)
    config = replace(config, model=model, scheduler=scheduler)
    for hooks in config_hooks():
        config = hooks.draft_config(config)
    return config


def check_draft_program(target: Program, draft: Program, name: str) -> None:
    """Raises ConfigError if a Program cannot draft for the target."""
    if "pooled" in draft.outputs:
        raise ConfigError(
            f"spec_model: got {name}, which is an encoder; expected a model that generates",
            hint="name a small decoder with the same tokenizer, or use --spec suffix",
        )
    check_keeps_tokens(target, "the model", "draft_model")
    check_keeps_tokens(draft, f"spec_model {name}", "draft_model", may_recur=False)
    own = original_context(draft)
    if own not in (ONE_CONTEXT, original_context(target)):
        raise ConfigError(
            f"spec_model: {name} changes its rope factors after {own.num_tokens:,} tokens, the"
            " model does not",
            hint="use a draft model with one list of rope factors, or with the model's",
        )


def check_keeps_tokens(program: Program, role: str, method: str, *, may_recur: bool = True) -> None:
    """Raises ConfigError if a Program caches anything other than the KV of single tokens. The model
    may have a recurrence, which returns to an earlier state; a draft model may not.
    """
    kinds = {group.kv_kind for group in program.groups} - {"growing", "window"}
    if may_recur:
        kinds.discard("state")
    if kinds:
        raise ConfigError(
            f"spec_method: {method} requires a cache of K and V for each token, {role} has"
            f" a {min(kinds)} cache",
            hint="use --spec-method suffix",
        )


def check_same_tokens(
    target: Tokenizer | None, draft: Tokenizer | None, sizes: tuple[int, int], name: str
) -> None:
    """Raises ConfigError if the vocabularies differ. Their `sizes` may be padded differently."""
    if target is None or draft is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"spec_model: {name} has vocab_size {sizes[1]:,}, expected {sizes[0]:,}, the"
                " model's, with skip_tokenizer_init",
                hint="remove skip_tokenizer_init: with tokenizers, the tokens are compared",
            )
        return
    for token_id in range(max(target.vocab_size, draft.vocab_size)):
        ours, theirs = _get_token(target, token_id), _get_token(draft, token_id)
        if ours != theirs:
            raise ConfigError(
                f"spec_model: {name} has another vocabulary: token id {token_id:,} is {theirs!r},"
                f" expected {ours!r}",
                hint="use a smaller model of the same family",
            )


def _get_token(tokenizer: Tokenizer, token_id: int) -> bytes | str:
    """Returns a token's bytes, the name of a special token, or "" if there is no such token."""
    if token_id >= tokenizer.vocab_size:
        return ""
    return tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id)


def add_footprints(target: Footprint, draft: Footprint, role: str = "draft") -> Footprint:
    """Returns the memory of both Programs, which run one after another. The draft's weights are
    counted separately, named by `role`.
    """
    own = {
        replace(weight, name=f"{role}.{weight.name}"): size
        for weight, size in draft.weight_bytes.items()
    }
    return replace(
        target,
        weight_bytes={**target.weight_bytes, **own},
        step_bytes=target.step_bytes + draft.step_bytes,
    )
