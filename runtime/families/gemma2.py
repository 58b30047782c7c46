"""Gemma 2: the Llama block with pre- and post-norms, soft-capped scores and logits, and a sliding window in every other layer.

Norm weights are stored minus one. The embedding is multiplied by the root of its width, rounded to the checkpoint's dtype as in training:
in bfloat16 that is 0.1% more at a width of 3072.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...quant.weight import from_f32, to_f32
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config, stored_dtype
from ..config_reader import Keys
from . import TensorRule, llama
from .qwen2 import layer_windows

# hidden_activation replaces hidden_act, sliding_window replaces sliding_window_size.
KEYS_HARMLESS = frozenset({"cache_implementation", "hidden_act", "sliding_window_size"})
REFUSED_UNLESS = {"mlp_bias": False, "use_bidirectional_attention": False}
ACT = ("hidden_activation", "gelu_pytorch_tanh")
SCHEMES = {"bfloat16": "bf16", "float16": "f16"}  # by dtype; any other is float32


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=8192, num_key_value_heads=4, head_dim=256, bos=2, eos=(1,), tied=True, act=ACT)
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    layer_types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return decoder_config(keys, base, **gemma_features(keys, layer_types, keys.integer("hidden_size")),
                          attn_logit_softcapping=softcap(keys, "attn_logit_softcapping", 50.0),
                          final_logit_softcapping=softcap(keys, "final_logit_softcapping", 30.0))


def gemma_features(keys: Keys, layer_types: Sequence[str], hidden: int) -> dict[str, object]:
    """Fields of a ModelConfig that Gemma 2 and 3 share. `layer_types`: the default if the config lists none."""
    bias = keys.flag("attention_bias", False)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    return {"windows": layer_windows(keys, window, layer_types), "qkv_bias": bias, "o_bias": bias, "norm_kind": "rms+1",
            "attn_scale": keys.number("query_pre_attn_scalar", 256.0) ** -0.5, "embedding_multiplier": embedding_multiplier(keys, hidden)}


def embedding_multiplier(keys: Keys, hidden: int) -> float:
    """The root of a width, rounded to the checkpoint's dtype."""
    scheme, root = SCHEMES.get(stored_dtype(keys), "f32"), np.array([hidden**0.5], np.float32)
    return float(to_f32(from_f32(root, scheme), scheme)[0])


def softcap(keys: Keys, name: str, default: float | None) -> float | None:
    """A soft cap; null means none, absent the default."""
    return keys.number(name, None if keys.has(name) else default)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role. post_attention_layernorm is a post-norm here; in Llama it is the norm before the MLP."""
    rules, prefix = llama.layer_tensors(config, layer), f"model.layers.{layer}."
    names = {"o_norm": "post_attention_layernorm", "post_norm": "pre_feedforward_layernorm", "down_norm": "post_feedforward_layernorm"}
    return rules | {role: TensorRule(f"{prefix}{name}.weight", rules["input_norm"].shape) for role, name in names.items()}
