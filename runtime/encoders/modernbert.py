"""ModernBERT: pre-norm layers with rotary embeddings, a gated FFN, and local attention in most of them (Warner et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys, show
from .encoder_config import MOST, EncoderConfig, act_of, refuse, sizes

if TYPE_CHECKING:
    from .layers import Stack
    from .ranking_head import RankingHead
    from .weights import Tensors

PREFIXES = ("model.",)
FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}  # as older configs say it


def config(keys: Keys) -> EncoderConfig:
    """Raises ConfigError."""
    kind = keys.text("model_type")
    refuse(keys, attention_bias=False, mlp_bias=False, norm_bias=False, classifier_bias=False)
    found = sizes(keys, intermediate_size=1152, num_hidden_layers=22, vocab_size=50368)
    layers = found["num_hidden_layers"]
    every = keys.integer("global_attn_every_n_layers", 3, high=MOST["layers"])
    kinds = keys.strings("layer_types", layers) or tuple(SLIDING if number % every else FULL for number in range(layers))
    if not set(kinds) <= THETAS.keys():
        raise ConfigError(f"config.json: layer_types has {show(sorted(set(kinds) - THETAS.keys())[0])}, which is not supported")
    thetas = {each: keys.number(*THETAS[each]) for each in THETAS}
    for each, rope in (keys.section("rope_parameters") or {}).items():
        if each in THETAS and isinstance(rope, dict):
            inner = Keys(rope, f"config.json: rope_parameters.{each}")
            refuse(inner, rope_type="default")
            thetas[each] = inner.number("rope_theta", THETAS[each][1])
    half = keys.integer("local_attention", 128, low=2, high=MOST["positions"]) // 2
    keys.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
    act_of(keys, "classifier_activation")
    return EncoderConfig(
        kind, **found, context_length=keys.integer("max_position_embeddings", 8192, high=MOST["positions"]),
        norm_eps=keys.number("norm_eps", 1e-5), hidden_act=act_of(keys, "hidden_activation"),
        thetas=tuple(thetas[each] for each in kinds), windows=tuple(half if each == SLIDING else None for each in kinds))


def load(config: EncoderConfig, tensors: Tensors) -> Stack:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS, Norm
    from .layers import Layer, Stack

    width, inner = config.hidden_size, config.intermediate_size

    def norm(name: str) -> Norm:
        return tensors.norm(name, width, config.norm_eps, False)

    def layer(number: int) -> Layer:
        at = f"layers.{number}."
        gate, up = tensors.halves(f"{at}mlp.Wi", inner, width)
        return Layer(tensors.linear(f"{at}attn.Wqkv", 3 * width, width, False), tensors.linear(f"{at}attn.Wo", width, width, False), up,
                     tensors.linear(f"{at}mlp.Wo", width, inner, False),
                     (norm(f"{at}attn_norm") if number else None, norm(f"{at}mlp_norm")), gate, config.thetas[number],
                     config.windows[number])

    return Stack(tensors.table("embeddings.tok_embeddings.weight", config.vocab_size, width), None, None, norm("embeddings.norm"),
                 tuple(map(layer, range(config.num_hidden_layers))), ACTIVATIONS[config.hidden_act], config.num_attention_heads, True,
                 norm("final_norm"))


def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
    """Raises CheckpointError."""
    from ..images.tower_ops import ACTIVATIONS
    from .ranking_head import RankingHead

    width, said = config.hidden_size, config.raw
    return RankingHead(tensors.linear("head.dense", width, width, False), ACTIVATIONS[said.get("classifier_activation") or "gelu"],
                tensors.linear("classifier", 1, width), tensors.norm("head.norm", width, config.norm_eps, False),
                said.get("classifier_pooling") == "mean")
