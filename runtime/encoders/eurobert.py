"""EuroBERT: Llama's layers with bidirectional attention (Boizard et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys
from .encoder_config import MAX_SIZES, EncoderConfig, default_theta, read_activation, read_sizes, require_values

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("model.",)
POOLINGS = {"bos": "bos", "mean": "mean", "late": "late"}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    require_values(keys, attention_bias=False, mlp_bias=False)
    sizes = read_sizes(keys, vocab_size=128_256)
    heads = sizes["num_attention_heads"]
    require_values(keys, head_dim=sizes["hidden_size"] // heads)
    kv_heads = keys.integer("num_key_value_heads", heads, high=MAX_SIZES["heads"])
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    keys.choice("classifier_pooling" if keys.has("classifier_pooling") else "clf_pooling", POOLINGS, "late")
    return EncoderConfig(
        keys.text("model_type"), **sizes, context_length=keys.integer("max_position_embeddings", 8192, high=MAX_SIZES["positions"]),
        norm_eps=keys.number("rms_norm_eps", 1e-5), hidden_act=read_activation(keys, "hidden_act", "silu"), kv_heads=kv_heads,
        rope_thetas=(default_theta(keys, 10_000.0),) * sizes["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS, Float32Matrix, Norm
    from .layers import Layer, Stack

    width, ffn_width, kv_heads, head_dim = config.hidden_size, config.intermediate_size, config.kv_heads, config.head_dim

    def norm(name: str) -> Norm:
        return Norm(tensors.numbers(f"{name}.weight", width), None, config.norm_eps, centered=False)

    def repeat_heads(name: str) -> np.ndarray:
        """Keys or values of grouped-query attention, repeated for each query head."""
        rows = tensors.numbers(f"{name}.weight", kv_heads * head_dim, width).reshape(kv_heads, head_dim, width)
        return np.repeat(rows, config.num_attention_heads // kv_heads, 0).reshape(width, width)

    def layer(number: int) -> Layer:
        prefix = f"layers.{number}."
        q = tensors.numbers(f"{prefix}self_attn.q_proj.weight", width, width)
        qkv = np.concatenate([q, *(repeat_heads(f"{prefix}self_attn.{part}_proj") for part in "kv")])
        return Layer(Float32Matrix(qkv.T, None), tensors.linear(f"{prefix}self_attn.o_proj", width, width, False),
                     tensors.linear(f"{prefix}mlp.up_proj", ffn_width, width, False),
                     tensors.linear(f"{prefix}mlp.down_proj", width, ffn_width, False),
                     (norm(f"{prefix}input_layernorm"), norm(f"{prefix}post_attention_layernorm")),
                     tensors.linear(f"{prefix}mlp.gate_proj", ffn_width, width, False), config.rope_thetas[number])

    return Stack(tensors.table("embed_tokens.weight", config.vocab_size, width), None, None, None,
                 tuple(map(layer, range(config.num_hidden_layers))), ACTIVATIONS[config.hidden_act], config.num_attention_heads, True,
                 norm("norm"))


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    width, raw = config.hidden_size, config.raw
    pooling = raw.get("classifier_pooling") or raw.get("clf_pooling") or "late"
    return RankingHead(tensors.linear("dense", width, width), ACTIVATIONS["gelu"], tensors.linear("classifier", 1, width),
                       uses_mean=pooling == "mean",
                       averages_outputs=pooling == "late")
