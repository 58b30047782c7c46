"""Nomic's BERT: rotary embeddings, a gated FFN, no biases (Nussbaum et al. 2024).

Version 2 has biases, no gate, and a mixture of experts in every other layer (Nussbaum et al. 2025). Configs use GPT-2's or transformers'
key names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MAX_SIZES, EncoderConfig, default_theta, read_sizes, require_values

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("bert.", "model.")
THETA = 1000.0


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    model_type = keys.text("model_type")
    require_values(keys, prenorm=False, causal=False, use_rms_norm=False, parallel_block=False, rotary_emb_fraction=1.0,
                   rotary_emb_interleaved=False, rotary_scaling_factor=None, hidden_act="silu", num_shared_experts=0, ffn_div=1,
                   expert_choice_router=False, moe_normalize_expert_weights=False)
    activation = keys.choice("activation_function", {"swiglu": "silu", "gelu": "gelu"}, "swiglu")
    experts = keys.integer("num_experts", 0, low=0, high=MAX_SIZES["layers"])
    older = keys.has("n_embd")
    names = ("n_embd", "n_inner", "n_layer", "n_head") if older else ()
    sizes = read_sizes(keys, *names, vocab_size=30528)
    require_values(keys, head_dim=sizes["hidden_size"] // sizes["num_attention_heads"])
    theta = keys.number("rotary_emb_base", THETA)
    if not older:
        theta = default_theta(keys, theta)
    return EncoderConfig(
        model_type, **sizes, context_length=keys.integer("n_positions" if older else "max_position_embeddings", 2048,
                                                         high=MAX_SIZES["positions"]),
        norm_eps=keys.number("layer_norm_epsilon" if older else "layer_norm_eps", 1e-12), hidden_act=activation,
        num_experts=experts, experts_per_token=keys.integer("moe_top_k", 1, high=experts) if experts else 0,
        moe_every_n_layers=keys.integer("moe_every_n_layers", 2, low=2, high=MAX_SIZES["layers"]) if experts else 1,
        type_vocab_size=keys.integer("type_vocab_size", 2, low=0, high=64), rope_thetas=(theta,) * sizes["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS, Float32Matrix
    from .experts import Experts
    from .layers import Layer, Stack

    width, ffn_width, eps, activation = config.hidden_size, config.intermediate_size, config.norm_eps, ACTIVATIONS[config.hidden_act]

    def linear(name: str, rows: int, columns: int) -> Float32Matrix:
        return tensors.linear(name, rows, columns, tensors.has(f"{name}.bias"))

    def experts(prefix: str) -> Experts:
        shape = config.num_experts, ffn_width, width
        if tensors.has(f"{prefix}experts.up.weight"):  # in GGUF files
            up = tensors.numbers(f"{prefix}experts.up.weight", *shape)
            down = tensors.numbers(f"{prefix}experts.down.weight", config.num_experts, width, ffn_width).swapaxes(1, 2)
        else:
            up, down = (tensors.numbers(f"{prefix}experts.mlp.{name}", shape[0] * ffn_width, width).reshape(shape) for name in ("w1", "w2"))
        bias = tensors.numbers(f"{prefix}experts.bias", width) if tensors.has(f"{prefix}experts.bias") else None
        return Experts(tensors.linear(f"{prefix}router.layer", config.num_experts, width, False),
                       tuple(Float32Matrix(expert.T, None) for expert in up),
                       tuple(Float32Matrix(expert, None) for expert in down), bias, config.experts_per_token, activation)

    def layer(number: int) -> Layer:
        prefix = f"encoder.layers.{number}."
        up, down, gate, moe = None, None, None, None
        if config.num_experts and number % config.moe_every_n_layers == 1:
            moe = experts(f"{prefix}mlp.")
        else:
            gated = config.hidden_act == "silu"
            up = linear(f"{prefix}mlp.fc11" if gated else f"{prefix}mlp.fc1", ffn_width, width)
            down = linear(f"{prefix}mlp.fc2", width, ffn_width)
            gate = linear(f"{prefix}mlp.fc12", ffn_width, width) if gated else None
        return Layer(linear(f"{prefix}attn.Wqkv", 3 * width, width), linear(f"{prefix}attn.out_proj", width, width), up, down,
                     (tensors.norm(f"{prefix}norm1", width, eps), tensors.norm(f"{prefix}norm2", width, eps)), gate,
                     config.rope_thetas[number], experts=moe)

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.optional_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, width),
                 tensors.norm("emb_ln", width, eps), tuple(map(layer, range(config.num_hidden_layers))), activation,
                 config.num_attention_heads)
