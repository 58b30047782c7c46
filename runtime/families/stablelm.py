"""StableLM (3B, 2 1.6B, Zephyr): the Llama block with layer norms that have biases, and rotary positions on a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, llama
from .llama import block

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "REFUSED_UNLESS", "block", "config", "layer_tensors", "normed", "outer_tensors"]

KEYS_USED = frozenset({"layer_norm_eps", "partial_rotary_factor", "use_qkv_bias"})
KEYS_HARMLESS = frozenset({"rms_norm_eps"})
# The 12B of StableLM 2 has what the last two say: a norm for every head apart, and attention beside the MLP.
REFUSED_UNLESS: Mapping[str, object] = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "sliding_window": None,
                                        "qk_layernorm": False, "use_parallel_residual": False}
SIZES = {"vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32}
SHARE = 0.25  # of a head that turns, where a config does not say


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return (rope_config(keys, head_dim, positions, partial=True, share=SHARE),) * layers

    base = Defaults(max_position_embeddings=4096, num_key_value_heads=32, bos=0, eos=(0,), eps_key="layer_norm_eps", norm_eps=1e-5,
                    sizes=SIZES)
    return decoder_config(keys, base, ropes, qkv_bias=keys.flag("use_qkv_bias", False), norm_kind="layer")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return normed(llama.layer_tensors(config, layer))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"norm_bias": biased(rules["norm"])}


def normed(rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """The tensors of a layer with biases of its two norms."""
    return {**rules, **{f"{role}_bias": biased(rules[role]) for role in ("input_norm", "post_norm")}}


def biased(norm: TensorRule) -> TensorRule:
    """The bias of a norm, or of a matrix."""
    return TensorRule(norm.name.removesuffix("weight") + "bias", norm.shape[:1])
