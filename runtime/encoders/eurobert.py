"""EuroBERT: Llama's layers with bidirectional attention (Boizard et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys
from .encoder_config import MOST, EncoderConfig, act_of, default_theta, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("model.",)
POOLINGS = {"bos": "bos", "mean": "mean", "late": "late"}


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    refuse(keys, attention_bias=False, mlp_bias=False)
    found = sizes(keys, vocab_size=128_256)
    heads = found["num_attention_heads"]
    refuse(keys, head_dim=found["hidden_size"] // heads)
    shared = keys.integer("num_key_value_heads", heads, high=MOST["heads"])
    if heads % shared:
        raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}")
    keys.choice("classifier_pooling" if keys.has("classifier_pooling") else "clf_pooling", POOLINGS, "late")
    return EncoderConfig(
        keys.text("model_type"), **found, context_length=keys.integer("max_position_embeddings", 8192, high=MOST["positions"]),
        norm_eps=keys.number("rms_norm_eps", 1e-5), hidden_act=act_of(keys, "hidden_act", "silu"), kv_heads=shared,
        thetas=(default_theta(keys, 10_000.0),) * found["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    import numpy as np

    from ..images.tower_ops import ACTIVATIONS, Float32Matrix, Norm
    from .layers import Layer, Stack

    width, inner, shared, depth = config.hidden_size, config.intermediate_size, config.kv_heads, config.head_dim

    def norm(name: str) -> Norm:
        return Norm(tensors.numbers(f"{name}.weight", width), None, config.norm_eps, centered=False)

    def repeated(name: str) -> np.ndarray:
        """Of keys or values, for each head of queries those that it sees."""
        rows = tensors.numbers(f"{name}.weight", shared * depth, width).reshape(shared, depth, width)
        return np.repeat(rows, config.num_attention_heads // shared, 0).reshape(width, width)

    def layer(number: int) -> Layer:
        at = f"layers.{number}."
        q = tensors.numbers(f"{at}self_attn.q_proj.weight", width, width)
        qkv = np.concatenate([q, *(repeated(f"{at}self_attn.{part}_proj") for part in "kv")])
        return Layer(Float32Matrix(qkv.T, None), tensors.linear(f"{at}self_attn.o_proj", width, width, False),
                     tensors.linear(f"{at}mlp.up_proj", inner, width, False), tensors.linear(f"{at}mlp.down_proj", width, inner, False),
                     (norm(f"{at}input_layernorm"), norm(f"{at}post_attention_layernorm")),
                     tensors.linear(f"{at}mlp.gate_proj", inner, width, False), config.thetas[number])

    return Stack(tensors.table("embed_tokens.weight", config.vocab_size, width), None, None, None,
                 tuple(map(layer, range(config.num_hidden_layers))), ACTIVATIONS[config.hidden_act], config.num_attention_heads, True,
                 norm("norm"))


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    width, said = config.hidden_size, config.raw
    pooling = said.get("classifier_pooling") or said.get("clf_pooling") or "late"
    return RankingHead(tensors.linear("dense", width, width), ACTIVATIONS["gelu"], tensors.linear("classifier", 1, width),
                       mean=pooling == "mean",
                late=pooling == "late")
