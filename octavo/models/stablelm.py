"""StableLM: Llama with LayerNorms and partial RoPE. Bellagente et al. 2024."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Frame, NormNames, layer_norm
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=32, norm_eps=1e-5, eps_name="layer_norm_eps")
    rope = rope_parameters(config, partial=0.25).table(shape.head_dim)
    parallel = config.flag("use_parallel_residual", False)
    return build_llama(
        config,
        shape=shape,
        ropes=(rope,) * shape.num_layers,
        qkv_bias=config.flag("use_qkv_bias", False),
        own_norms="modules" if config.flag("qk_layernorm", False) else "",
        norm_names=("q_layernorm", "k_layernorm"),
        frame=Frame(
            norms=NormNames(before_mlp=None) if parallel else NormNames(),
            norm=layer_norm(shape.norm_eps),
            parallel=parallel,
        ),
    )
