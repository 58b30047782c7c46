"""Nomic's BERT: rotary positions in the place of learned ones, a gated FFN, no biases (Nussbaum et al. 2024). Configs
name things as GPT-2 did, or as transformers does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .shape import MOST, EncoderConfig, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("bert.", "model.")
THETA = 1000.0


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    refuse(keys, prenorm=False, causal=False, use_rms_norm=False, parallel_block=False, rotary_emb_fraction=1.0,
           rotary_emb_interleaved=False, rotary_scaling_factor=None, num_experts=0, qkv_proj_bias=False,
           mlp_fc1_bias=False, mlp_fc2_bias=False, activation_function="swiglu", hidden_act="silu")
    older = keys.holds("n_embd")
    names = ("n_embd", "n_inner", "n_layer", "n_head") if older else ()
    found = sizes(keys, *names, vocab_size=30528)
    refuse(keys, head_dim=found["hidden_size"] // found["num_attention_heads"])
    theta = keys.number("rotary_emb_base", THETA)
    if not older and (rope := keys.section("rope_parameters")) is not None:
        inner = Keys(rope, "config.json: rope_parameters")
        refuse(inner, rope_type="default")
        theta = inner.number("rope_theta", THETA)
    return EncoderConfig(
        kind, **found, context_length=keys.integer("n_positions" if older else "max_position_embeddings", 2048, high=MOST["positions"]),
        norm_eps=keys.number("layer_norm_epsilon" if older else "layer_norm_eps", 1e-12), hidden_act="silu",
        type_rows=keys.integer("type_vocab_size", 2, high=64), thetas=(theta,) * found["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_parts import CURVES
    from .layers import Layer, Stack

    width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def layer(number: int) -> Layer:
        at = f"encoder.layers.{number}."
        return Layer(tensors.linear(f"{at}attn.Wqkv", 3 * width, width, False), tensors.linear(f"{at}attn.out_proj", width, width, False),
                     tensors.linear(f"{at}mlp.fc11", inner, width, False), tensors.linear(f"{at}mlp.fc2", width, inner, False),
                     (tensors.norm(f"{at}norm1", width, eps), tensors.norm(f"{at}norm2", width, eps)),
                     tensors.linear(f"{at}mlp.fc12", inner, width, False), config.thetas[number])

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("emb_ln", width, eps), tuple(map(layer, range(config.num_hidden_layers))), CURVES[config.hidden_act],
                 config.num_attention_heads)
