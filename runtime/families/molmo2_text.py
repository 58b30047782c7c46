"""The text part of Molmo 2: Qwen 3, or OLMo 3 without windows, with fused QKV and fused gate and up. Input-only tokens have their
embedding rows in a separate tensor."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, fused, llama

KEYS_HARMLESS = frozenset({"embedding_dropout", "residual_dropout"})
REFUSED_UNLESS = {"attention_bias": False, "qkv_bias": False, "use_qk_norm": True}
SIZES = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
FUSED = {"self_attn.att_proj": ("q", "k", "v"), "mlp.ff_proj": ("up", "gate")}
EMBEDDING_NAME, STORED_EMBEDDINGS = "model.embed_tokens.weight", ("model.wte.embedding", "model.wte.new_embedding")


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=36_864, num_key_value_heads=8, head_dim=128, eps_key=None, sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    scaled_layers = keys.layers("rope_scaling_layers", layers)
    if keys.raw.get("rope_scaling_layers") is None:
        scaled_layers = frozenset(range(layers))

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        rope = rope_config(keys, head_dim, positions)
        plain = RopeConfig(rope.theta, "default", {})
        return tuple(rope if layer in scaled_layers else plain for layer in range(layers))

    norm_after = keys.flag("norm_after", False)
    full_width = keys.choice("qk_norm_type", {"qwen3": "qwen3", "olmo": "olmo"}, "qwen3") == "olmo"
    if norm_after != full_width:
        raise ConfigError(f"config.json: norm_after = {str(norm_after).lower()} is not supported for molmo2_text models with this "
                          "qk_norm_type",
                          "post-norms go with QK norms over all heads (olmo), pre-norms with one for each head (qwen3)")
    config = decoder_config(keys, base, ropes, qk_norm=True, qk_norm_full_width=full_width)
    eps = keys.number("layer_norm_eps", keys.number("rms_norm_eps", base.norm_eps))
    return replace(config, norm_eps=eps, extra_embeddings=keys.integer("additional_vocab_size", 128, low=0, high=1 << 16))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; models with full-width QK norms have post-norms in place of pre-norms."""
    rules = fused(llama.layer_tensors(config, layer), layer, FUSED)
    if config.qk_norm_full_width:
        rules |= {"o_norm": rules.pop("input_norm"), "down_norm": rules.pop("post_norm")}
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, with rows for tokens that are never generated, final norm and head."""
    rules = llama.outer_tensors(config)
    return rules | {"embed": TensorRule(EMBEDDING_NAME, (config.vocab_size + config.extra_embeddings, config.hidden_size))}


def joined_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """The embedding -> the two tensors that store it, with their rows; listed with layer 0."""
    heights = config.vocab_size, config.extra_embeddings
    return {} if layer else {EMBEDDING_NAME: tuple(zip(STORED_EMBEDDINGS, heights, strict=True))}
