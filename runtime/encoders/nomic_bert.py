"""Nomic's BERT: rotary embeddings, a gated FFN, no biases (Nussbaum et al. 2024); version 2 has biases, no gate, and a mixture of experts
in every other layer (Nussbaum et al. 2025). Configs use GPT-2's or transformers' key names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import Keys
from .encoder_config import MOST, EncoderConfig, default_theta, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .weights import Tensors

PREFIXES = ("bert.", "model.")
THETA = 1000.0


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    refuse(keys, prenorm=False, causal=False, use_rms_norm=False, parallel_block=False, rotary_emb_fraction=1.0,
           rotary_emb_interleaved=False, rotary_scaling_factor=None, hidden_act="silu", num_shared_experts=0, ffn_div=1,
           expert_choice_router=False, moe_normalize_expert_weights=False)
    act = keys.choice("activation_function", {"swiglu": "silu", "gelu": "gelu"}, "swiglu")
    experts = keys.integer("num_experts", 0, low=0, high=MOST["layers"])
    older = keys.has("n_embd")
    names = ("n_embd", "n_inner", "n_layer", "n_head") if older else ()
    found = sizes(keys, *names, vocab_size=30528)
    refuse(keys, head_dim=found["hidden_size"] // found["num_attention_heads"])
    theta = keys.number("rotary_emb_base", THETA)
    if not older:
        theta = default_theta(keys, theta)
    return EncoderConfig(
        kind, **found, context_length=keys.integer("n_positions" if older else "max_position_embeddings", 2048, high=MOST["positions"]),
        norm_eps=keys.number("layer_norm_epsilon" if older else "layer_norm_eps", 1e-12), hidden_act=act,
        experts=experts, experts_per_token=keys.integer("moe_top_k", 1, high=experts) if experts else 0,
        experts_every=keys.integer("moe_every_n_layers", 2, low=2, high=MOST["layers"]) if experts else 1,
        type_rows=keys.integer("type_vocab_size", 2, low=0, high=64), thetas=(theta,) * found["num_hidden_layers"])


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS, Float32Matrix
    from .experts import Experts
    from .layers import Layer, Stack

    width, inner, eps, curve = config.hidden_size, config.intermediate_size, config.norm_eps, ACTIVATIONS[config.hidden_act]

    def linear(name: str, rows: int, depth: int) -> Float32Matrix:
        return tensors.linear(name, rows, depth, tensors.has(f"{name}.bias"))

    def experts(at: str) -> Experts:
        shape = config.experts, inner, width
        if tensors.has(f"{at}experts.up.weight"):  # as GGUF files have them
            up = tensors.numbers(f"{at}experts.up.weight", *shape)
            down = tensors.numbers(f"{at}experts.down.weight", config.experts, width, inner).swapaxes(1, 2)
        else:
            up, down = (tensors.numbers(f"{at}experts.mlp.{name}", shape[0] * inner, width).reshape(shape) for name in ("w1", "w2"))
        bias = tensors.numbers(f"{at}experts.bias", width) if tensors.has(f"{at}experts.bias") else None
        return Experts(tensors.linear(f"{at}router.layer", config.experts, width, False), tuple(Float32Matrix(each.T, None) for each in up),
                       tuple(Float32Matrix(each, None) for each in down), bias, config.experts_per_token, curve)

    def layer(number: int) -> Layer:
        at = f"encoder.layers.{number}."
        up, down, gate, visited = None, None, None, None
        if config.experts and number % config.experts_every == 1:
            visited = experts(f"{at}mlp.")
        else:
            gated = config.hidden_act == "silu"
            up, down = linear(f"{at}mlp.fc11" if gated else f"{at}mlp.fc1", inner, width), linear(f"{at}mlp.fc2", width, inner)
            gate = linear(f"{at}mlp.fc12", inner, width) if gated else None
        return Layer(linear(f"{at}attn.Wqkv", 3 * width, width), linear(f"{at}attn.out_proj", width, width), up, down,
                     (tensors.norm(f"{at}norm1", width, eps), tensors.norm(f"{at}norm2", width, eps)), gate, config.thetas[number],
                     experts=visited)

    return Stack(tensors.table("embeddings.word_embeddings.weight", config.vocab_size, width), None,
                 tensors.table("embeddings.token_type_embeddings.weight", config.type_rows, width) if config.type_rows else None,
                 tensors.norm("emb_ln", width, eps), tuple(map(layer, range(config.num_hidden_layers))), curve,
                 config.num_attention_heads)
