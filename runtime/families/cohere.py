"""Command R, R+ and Aya 23 (Cohere's first family): parallel attention and MLP under one bias-free layer norm (R+ also on every head of
q and k), interleaved RoPE, and scaled logits."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..layer import Layer, last_of, narrowing
from . import TensorRule, llama
from .llama import mlp_or_experts

KEYS_HARMLESS = frozenset({"model_max_length", "rms_norm_eps", "use_embedding_sharing", "use_parallel_embedding"})
REFUSED_UNLESS = {
    "layer_types": None, "mlp_bias": False, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window": None,
    "use_gated_activation": True, "use_parallel_block": True}
SIZES = {"vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40, "num_attention_heads": 64}
LOGIT_SCALE = 0.0625
THETA = 500_000.0  # of this family alone, not of Cohere 2


def config(keys: Keys) -> ModelConfig:
    qk_norm = keys.flag("use_qk_norm", False)
    return cohere_config(keys, THETA, qk_norm=qk_norm, qk_norm_per_head=qk_norm)


def cohere_config(keys: Keys, theta: float = 10_000.0, **features: object) -> ModelConfig:
    """The config of a family with Cohere's block. `theta`: default of rope_theta; `features`: further fields of the ModelConfig. Raises
    ConfigError if the heads do not add up to hidden_size."""
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=8192, bos=5, eos=(255_001,), eps_key="layer_norm_eps", norm_eps=1e-5, tied=True, sizes=SIZES,
                    theta=theta, rope={"interleaved": True})
    config = decoder_config(keys, base, qkv_bias=bias, o_bias=bias, norm_kind="layer",
                            logits_scaling=1 / keys.number("logit_scale", LOGIT_SCALE), **features)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConfigError(f"config.json: head_dim {config.head_dim} is not supported for {config.num_attention_heads} heads of a width of "
                          f"{config.hidden_size}", "heads of this family add up to hidden_size")
    return config


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: one norm for both branches."""
    rules = llama.layer_tensors(config, layer)
    del rules["post_norm"]
    return rules


@narrowing
def block(x: object, at: Layer) -> object:
    """Attention and MLP (or experts) in parallel, with the taps of Llama's block. The MLP is added to x first, because it reads the same
    input as attention; then the attention output."""
    ops, w, positions, rope, config = at.ops, at.w, at.positions, at.rope, at.config
    at.tap("block_in", x)
    q, k, v = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v])
    q = ops.rope_heads(q, config.num_attention_heads, config.head_dim, positions, rope, w.q_norm)
    k = ops.rope_heads(k, config.num_key_value_heads, config.head_dim, positions, rope, w.k_norm)
    at.tap_heads(q, k, v)
    attended = at.kv.attend(q, k, v, None)
    x = last_of(x, len(attended))
    at.tap("attn_out", attended)
    if w.gate is None and not w.experts:
        at.tap("mlp_in", x)
        x = ops.mlp(x, w.post_norm, w.up, w.down, config.hidden_act, at.observer("mlp_hidden"))
    else:
        x = mlp_or_experts(x, at)
    x = ops.linear_add(attended, w.o, x)
    at.tap("block_out", x)
    return x
