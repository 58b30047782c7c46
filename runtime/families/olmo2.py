"""OLMo 2: the Llama block with post-norms in place of pre-norms, and QK norms over the whole width."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama

REFUSED_UNLESS = {"clip_qkv": None, "layer_types": None, "mlp_bias": False, "sliding_window": None}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=2048, eos=(50_279,), norm_eps=1e-5)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_full_width=True)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: post-norms only; that of attention has the name of Llama's pre-norm of the MLP."""
    rules = llama.layer_tensors(config, layer)
    prefix, shape = f"model.layers.{layer}.", rules.pop("input_norm").shape
    del rules["post_norm"]
    return rules | {"o_norm": TensorRule(f"{prefix}post_attention_layernorm.weight", shape),
                    "down_norm": TensorRule(f"{prefix}post_feedforward_layernorm.weight", shape)}
