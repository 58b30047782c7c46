"""Muse Glimmer's text part (Meta, 30B): pre- and post-norms, a normed embedding and weightless QK norms, gated attention, and RoPE only in
windowed layers, beside every fourth layer with full attention and no positions.

Weights of the layers' norms are stored minus one, that of the final norm is not; post-norms have their own epsilon. GGUF files fold the
query factor into weighted QK norms; a folder converted from one states so in its config.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import GLOBAL, LOCAL, RopeConfig, rope_config
from . import TensorRule, gemma2, llama
from .llama import with_entry_norm
from .qwen2 import layer_windows

WEIGHTED_QK_NORM_KEY = "qk_norm_stored"  # QK norms have weights, as in GGUF files
KEYS_HARMLESS = frozenset({"cache_implementation", "hidden_act"})
REFUSED_UNLESS = {"mlp_bias": False, "use_bidirectional_attention": False}
SIZES = {"vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52, "num_attention_heads": 32}
WINDOW, FULL_ATTENTION_INTERVAL = 2048, 4  # counted from the last layer back, the first of every 4 has full attention
POST_NORM_EPS, LOGIT_CAP, QK_SCALE, OUTPUT_MULTIPLIER = 1e-8, 20.0, 3.87, 26**-0.5


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=2, head_dim=128, bos=200_000, eos=(200_001,), norm_eps=1e-5,
                    act=("hidden_activation", "silu"), sizes=SIZES)
    layers, bias = base.size(keys, "num_hidden_layers"), keys.flag("attention_bias", False)
    weighted_qk_norm = keys.flag(WEIGHTED_QK_NORM_KEY, False)
    default_kinds = [GLOBAL if (layers - 1 - layer) % FULL_ATTENTION_INTERVAL == 0 else LOCAL for layer in range(layers)]
    windows = layer_windows(keys, keys.integer("sliding_window", None if keys.has("sliding_window") else WINDOW), default_kinds)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        rope = rope_config(keys, head_dim, positions)
        return tuple(rope if rotated else None for rotated in _rotated_layers(keys, default_kinds, rope))

    scale = keys.number("qk_scale_factor", QK_SCALE)
    config = decoder_config(keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, norm_kind="rms+1", final_norm_kind="rms",
                            post_norm_eps=keys.number("post_norm_eps", POST_NORM_EPS), embedding_norm=True, output_gate=True,
                            qk_norm=weighted_qk_norm, qk_norm_unweighted=not weighted_qk_norm, qk_norm_without_rope=True,
                            logits_scaling=1 / keys.number("output_multiplier", OUTPUT_MULTIPLIER),
                            final_logit_softcapping=gemma2.softcap(keys, "final_logit_softcapping", LOGIT_CAP))
    return replace(config, attn_scale=scale * config.head_dim**-0.5)


def _rotated_layers(keys: Keys, default_kinds: list[str], rope: RopeConfig) -> tuple[bool, ...]:
    """By layer, whether it has RoPE: layer_rope_theta is not 0; without that list, the windowed layers. Raises ConfigError for a theta
    other than rope_theta, which transformers would ignore."""
    if not keys.has("layer_rope_theta") or keys.raw["layer_rope_theta"] is None:
        return tuple(kind == LOCAL for kind in default_kinds)
    thetas = keys.numbers("layer_rope_theta", len(default_kinds), or_zero=True)
    if unsupported := next((theta for theta in thetas if theta and theta != rope.theta), None):
        raise ConfigError(f"config.json: layer_rope_theta holds {show(unsupported)} beside a rope_theta of {show(rope.theta)}, which is "
                          "not supported", "a layer of this family uses rope_theta, or 0 for no positions")
    return tuple(map(bool, thetas))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: Gemma 2's, and the attention gates."""
    gates = config.num_attention_heads * config.head_dim, config.hidden_size
    return gemma2.layer_tensors(config, layer) | {"attn_gate": TensorRule(f"model.layers.{layer}.self_attn.gate_proj.weight", gates)}


block = with_entry_norm(llama.block)
