"""The audio tower of Gemma 4: two convolutions over time and mel bands, which leave a row for each
40 ms, and Conformer layers (two MLPs around attention to the last rows and a causal convolution).

Gulati et al. 2020 (Conformer); Dai et al. 2019 (attention to relative positions); Zhang et al. 2023
(USM, which this tower follows); Gemma team 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.models.audio import AUDIO, PROJECTED, AudioLayout, audio_config
from octavo.models.clipped_linears import ClippedLinears
from octavo.models.config_keys import refuse_unread
from octavo.models.hf_config import HfConfig
from octavo.models.vision import KEPT_LAYERS, finish_vision
from octavo.program.build_family_ops import columns, concat
from octavo.program.build_mixers import short_conv
from octavo.program.builder import Builder
from octavo.program.family_ops import PositionScores
from octavo.program.ops import Activation, Embedding, HeadLinear, RopeTable
from octavo.program.program import (
    TAPS,
    CacheGroup,
    Harmonics,
    Program,
    Selection,
    Sinusoids,
    Value,
    Weight,
)

MODULE = "audio_tower"
CONVOLVED = "convolved"
"""Cache group of the rows that the layers' convolutions read."""
MAX_ROWS = 750
"""Most rows of an audio, 30 s."""
KEY_MULTIPLE = 16
"""The columns of the relative positions in keys are a multiple of this."""
UNLIMITED = 1e10
"""Limit of activations that has no effect in fp32."""
KEY_SCALE = math.log2(1 + math.e)


def audio_layout(config: HfConfig) -> AudioLayout:
    token_id = config.integer("audio_token_id", 258_881)
    begin, end = config.integer("boa_token_id", 256_000), config.integer("eoa_token_index", 258_883)
    has_own_inputs = config.integer("hidden_size_per_layer_input", 256) > 0
    return AudioLayout(
        token_id=token_id,
        row_id=config.integer("pad_token_id", 0) if has_own_inputs else None,
        written=(begin, token_id, end),
        num_bands=_channels(audio_config(config))[0],
        window_rows=MAX_ROWS,
        rows_per_token=1,
        is_padded=False,
        features="usm",
    )


def build_audio(config: HfConfig) -> dict[str, Program]:
    """Returns the Programs of the tower and of its projector."""
    sound = audio_config(config)
    tower = _Conformer.read(sound, ClippedLinears.read(config, sound)).build()
    b = Builder(PROJECTED)
    x = b.input_rows(sound.size("output_proj_dims", 1536))
    eps = sound.number("rms_norm_eps", 1e-6)
    x = b.rms_norm(x, "embed_audio.embedding_pre_projection_norm", eps, has_weight=False)
    x = b.linear(x, "embed_audio.embedding_projection", config.size("hidden_size"))
    sound.without_effect("model_type", "initializer_range", "dtype")
    sound.without_effect("attention_invalid_logits_value")  # the score of keys that are not read
    refuse_unread({"model_type": "audio_config", **sound.values}, sound.values.asked)
    return {AUDIO: tower, PROJECTED: b.finish(rows=b.gather_rows(x))}


def _channels(sound: HfConfig) -> tuple[int, int]:
    """Returns the channels of both convolutions; the first are as many as the mel bands."""
    given = sound.integers("subsampling_conv_channels") or (128, 32)
    if len(given) != 2 or given[0] % 4 or min(given) < 1:
        raise UnsupportedModel(
            f"config.json: subsampling_conv_channels in audio_config is {list(given)}, expected two"
            " numbers above 0, the first a multiple of 4"
        )
    return given[0], given[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conformer:
    """The layers of a config."""

    sound: HfConfig
    clips: ClippedLinears
    width: int
    num_heads: int
    window: int
    """Rows that a row attends to, including itself."""
    taps: int
    eps: float
    limit: float | None
    """Limit of the magnitude of activations."""

    @staticmethod
    def read(sound: HfConfig, clips: ClippedLinears) -> _Conformer:
        width = sound.size("hidden_size", 1024)
        num_heads = sound.size("num_attention_heads", 8)
        chunk = sound.integer("attention_chunk_size", 12, low=1)
        left = sound.integer("attention_context_left", 13, low=2)
        if width % num_heads or (chunk + left - 1) // 2 != left - 1:
            raise UnsupportedModel(
                f"config.json: audio_config has hidden_size {width}, {num_heads} heads,"
                f" attention_chunk_size {chunk} and attention_context_left {left}, expected a"
                " divisor of hidden_size as the number of heads, and one chunk and one row as the"
                " left context"
            )
        sound.refuse_unless("attention_context_right", 0)
        sound.without_effect("attention_context_right")
        limit = sound.positive("gradient_clipping", UNLIMITED)
        return _Conformer(
            sound=sound,
            clips=clips,
            width=width,
            num_heads=num_heads,
            window=left - 1,
            taps=sound.integer("conv_kernel_size", 5, low=1),
            eps=sound.number("rms_norm_eps", 1e-6),
            limit=limit if limit < UNLIMITED else None,
        )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def num_pairs(self) -> int:
        """Frequencies of the relative positions, padded with some that have no effect."""
        needed = 2 * (self.window // 2 + 1)
        return -(-needed // KEY_MULTIPLE) * KEY_MULTIPLE // 2

    @property
    def rope(self) -> RopeTable:
        frequencies = (2 * math.pi / self.window * order for order in range(self.num_pairs))
        return RopeTable(tuple(frequencies))

    def build(self) -> Program:
        dim, heads = self.head_dim, self.num_heads
        key_width = 2 * self.num_pairs + dim
        keys = CacheGroup(AUDIO, "window", KEPT_LAYERS, heads, key_width, dim)
        rows = CacheGroup(CONVOLVED, "conv", KEPT_LAYERS, 1, self.width, 0)
        groups = (
            replace(keys, window=self.window, one_step=True),
            replace(rows, window=self.taps, one_step=True),
        )
        b = Builder(AUDIO, groups)
        x = self._convolve(b)
        ones = b.value("ones", "tokens", heads)
        table = Weight(f"{MODULE}.ones", (1, heads), fill=1.0)
        b.append(Embedding(ones, table, by_position=True, others_first=True))
        for i in range(self.sound.count("num_hidden_layers", 12)):
            x = self._layer(b, x, ones, i)
        width = self.sound.size("output_proj_dims", 1536)
        return finish_vision(b, b.linear(x, f"{MODULE}.output_proj", width, bias=True))

    def _convolve(self, b: Builder) -> Value:
        """Appends both convolutions, each of which skips every other row and band."""
        name = f"{MODULE}.subsample_conv_projection"
        first, second = _channels(self.sound)
        rows = b.input_rows(TAPS * TAPS * first)
        runs = (columns(b, rows, tap * TAPS * first, TAPS * first) for tap in range(TAPS))
        taps = [self._convolve_bands(b, run, f"{name}.layer0", (first, 1), first) for run in runs]
        x = self._convolve_bands(b, concat(b, taps), f"{name}.layer1", (first // 2, first), second)
        return b.linear(x, f"{name}.input_proj_linear", self.width)

    def _convolve_bands(
        self, b: Builder, x: Value, name: str, inputs: tuple[int, int], channels: int
    ) -> Value:
        """Appends a convolution over TAPS rows of `inputs` (bands, channels), a norm and ReLU."""
        num_bands, num_inputs = inputs
        shape = (num_bands // 2 * channels, TAPS * num_bands * num_inputs)
        weight = Weight(f"{name}.conv.weight", shape, kernel=inputs, stored_as="strided")
        x = b.linear_from(x, weight, name=name)
        x = b.layer_norm(x, f"{name}.norm", self.eps, bias=False, group_width=channels)
        return b.act(x, "relu")

    def _layer(self, b: Builder, x: Value, ones: Value, i: int) -> Value:
        name = f"{MODULE}.layers.{i}"
        x = self._mlp(b, x, f"{name}.feed_forward1")
        h = b.rms_norm(b.clip(x, self.limit), f"{name}.norm_pre_attn", 1e-6)
        h = self._attend(b, h, ones, f"{name}.self_attn", i)
        x = b.add(x, b.rms_norm(b.clip(h, self.limit), f"{name}.norm_post_attn", 1e-6))
        x = self._convolve_rows(b, x, f"{name}.lconv1d", i)
        x = self._mlp(b, x, f"{name}.feed_forward2")
        return b.rms_norm(b.clip(x, self.limit), f"{name}.norm_out", 1e-6)

    def _mlp(self, b: Builder, x: Value, name: str) -> Value:
        h = b.rms_norm(b.clip(x, self.limit), f"{name}.pre_layer_norm", 1e-6)
        h = self.clips.linear(b, h, f"{name}.ffw_layer_1", 4 * self.width)
        h = b.act(h, self._activation)
        h = self.clips.linear(b, h, f"{name}.ffw_layer_2", self.width)
        h = b.rms_norm(b.clip(h, self.limit), f"{name}.post_layer_norm", 1e-6)
        return b.add(x, b.scale(h, self.sound.number("residual_weight", 0.5)))

    @property
    def _activation(self) -> Activation:
        return self.sound.activation("hidden_act", "silu")

    def _convolve_rows(self, b: Builder, x: Value, name: str, i: int) -> Value:
        """Appends a gated linear layer, a causal convolution per column and a linear layer."""
        h = b.rms_norm(x, f"{name}.pre_layer_norm", self.eps)
        h = self.clips.linear(b, h, f"{name}.linear_start", 2 * self.width)
        left, gate = (columns(b, h, start, self.width) for start in (0, self.width))
        h = b.act_mul(gate, left, "sigmoid")
        (h,) = short_conv(b, h, f"{name}.depthwise_conv1d", CONVOLVED, i % KEPT_LAYERS)
        h = b.rms_norm(b.clip(h, self.limit), f"{name}.conv_norm", self.eps)
        h = b.act(h, self._activation)
        return b.add(x, self.clips.linear(b, h, f"{name}.linear_end", self.width))

    def _attend(self, b: Builder, x: Value, ones: Value, name: str, i: int) -> Value:
        """Appends attention whose scores are those of keys plus those of relative positions.

        The latter are a function of the distance, so they are a sum of waves, each of which is the
        product of a query column pair and a key column pair that RoPE rotates by their positions.
        """
        width, heads = self.width, self.num_heads
        kept = i % KEPT_LAYERS
        q, k, v = (self.clips.linear(b, x, f"{name}.{part}_proj", width) for part in "qkv")
        q = b.mul(q, self._query_factors(b, x, name))
        k = b.scale(k, KEY_SCALE)
        scores = b.value(f"{name}.position_scores", "tokens", heads * self.window)
        b.append(
            PositionScores(
                q,
                scores,
                Weight(f"{MODULE}.distances", (self.window, width), fill=Sinusoids(width // 2 - 1)),
                Weight(f"{name}.relative_k_proj.weight", (width, width)),
                bias=Weight(f"{MODULE}.no_bias", (width,), fill=0.0),
                num_heads=heads,
            )
        )
        pairs = self.num_pairs
        rows = 2 * pairs * heads
        one = ((0,) * pairs + (-1,) * pairs) * heads
        waves = Weight(f"{MODULE}.waves", (rows, self.window), fill=Harmonics(pairs))
        q = self._lead(b, scores, waves, q)
        k = self._lead(b, ones, Weight(f"{MODULE}.one", (rows, 1), fill=Selection(one)), k)
        b.kv_write(AUDIO, kept, (k,), v)
        out = b.attention(
            q,
            AUDIO,
            kept,
            num_heads=heads,
            scale=1.0,
            mask="window",
            softcap=self.sound.positive("attention_logit_cap", 50.0),
        )
        return self.clips.linear(b, out, f"{name}.post", width)

    def _query_factors(self, b: Builder, x: Value, name: str) -> Value:
        """Appends the factors of a query's columns, which all heads share."""
        module = f"{name}.per_dim_scale"
        table = Weight(
            module,
            (1, self.width),
            (module,) * self.num_heads,
            kernel=(self.head_dim,),
            stored_as="heads",
        )
        factors = b.like(module, x)
        b.append(Embedding(factors, table, by_position=True, others_first=True))
        scale = self.head_dim**-0.5 / math.log(2)
        return b.scale(b.act(factors, "softplus"), scale)

    def _lead(self, b: Builder, x: Value, weight: Weight, tail: Value) -> Value:
        """Appends heads of rotated columns, computed from x, followed by those of `tail`."""
        out = b.value(weight.name, "tokens", weight.shape[0] + tail.width)
        b.append(HeadLinear(x, out, weight, self.num_heads, tail=tail))
        return b.rope(out, self.num_heads, self.rope)
