"""ModernBERT: pre-norm layers with rotary embeddings, a gated FFN, and local attention in most of them (Warner et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys, show
from .encoder_config import MAX_SIZES, EncoderConfig, read_activation, read_sizes, require_values

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("model.",)
FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}  # keys of older configs, and defaults


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    model_type = keys.text("model_type")
    require_values(keys, attention_bias=False, mlp_bias=False, norm_bias=False, classifier_bias=False)
    sizes = read_sizes(keys, intermediate_size=1152, num_hidden_layers=22, vocab_size=50368)
    layers = sizes["num_hidden_layers"]
    every = keys.integer("global_attn_every_n_layers", 3, high=MAX_SIZES["layers"])
    layer_types = keys.strings("layer_types", layers) or tuple(SLIDING if number % every else FULL for number in range(layers))
    if not set(layer_types) <= THETAS.keys():
        raise ConfigError(f"config.json: layer_types has {show(sorted(set(layer_types) - THETAS.keys())[0])}, which is not supported")
    thetas = {layer_type: keys.number(*THETAS[layer_type]) for layer_type in THETAS}
    for layer_type, rope in (keys.section("rope_parameters") or {}).items():
        if layer_type in THETAS and isinstance(rope, dict):
            rope_keys = Keys(rope, f"config.json: rope_parameters.{layer_type}")
            require_values(rope_keys, rope_type="default")
            thetas[layer_type] = rope_keys.number("rope_theta", THETAS[layer_type][1])
    window = keys.integer("local_attention", 128, low=2, high=MAX_SIZES["positions"]) // 2
    keys.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
    read_activation(keys, "classifier_activation")
    return EncoderConfig(
        model_type, **sizes, context_length=keys.integer("max_position_embeddings", 8192, high=MAX_SIZES["positions"]),
        norm_eps=keys.number("norm_eps", 1e-5), hidden_act=read_activation(keys, "hidden_activation"),
        rope_thetas=tuple(thetas[layer_type] for layer_type in layer_types), windows=tuple(window if layer_type == SLIDING else None
                                                                                           for layer_type in layer_types))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS, Norm
    from .layers import Layer, Stack

    width, ffn_width = config.hidden_size, config.intermediate_size

    def norm(name: str) -> Norm:
        return tensors.norm(name, width, config.norm_eps, False)

    def layer(number: int) -> Layer:
        prefix = f"layers.{number}."
        gate, up = tensors.split_linear(f"{prefix}mlp.Wi", ffn_width, width)
        return Layer(tensors.linear(f"{prefix}attn.Wqkv", 3 * width, width, False), tensors.linear(f"{prefix}attn.Wo", width, width, False),
                     up, tensors.linear(f"{prefix}mlp.Wo", width, ffn_width, False),
                     (norm(f"{prefix}attn_norm") if number else None, norm(f"{prefix}mlp_norm")), gate, config.rope_thetas[number],
                     config.windows[number])

    return Stack(tensors.table("embeddings.tok_embeddings.weight", config.vocab_size, width), None, None, norm("embeddings.norm"),
                 tuple(map(layer, range(config.num_hidden_layers))), ACTIVATIONS[config.hidden_act], config.num_attention_heads, True,
                 norm("final_norm"))


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    width, raw = config.hidden_size, config.raw
    return RankingHead(tensors.linear("head.dense", width, width, False), ACTIVATIONS[raw.get("classifier_activation") or "gelu"],
                       tensors.linear("classifier", 1, width), tensors.norm("head.norm", width, config.norm_eps, False),
                       raw.get("classifier_pooling") == "mean")
