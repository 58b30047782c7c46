"""Persimmon (8B): GPT-NeoX's fused QKV, attention and an ungated MLP with squared ReLU in sequence, layer norms with biases, also on every
head of q and k, and RoPE on half of each head.

The store splits q, k and v (`tensor_views.py`).
"""

from __future__ import annotations

import numpy as np

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama, opt
from .stablelm import bias_rule

LIKE = opt
# Keys of other families that transformers ignores in this one.
KEYS_HARMLESS = frozenset({"head_dim", "num_key_value_heads", "rms_norm_eps"})
REFUSED_UNLESS = {"attention_bias": True, "layer_types": None, "mlp_bias": True, "sliding_window": None}
SIZES = {"vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 36, "num_attention_heads": 64}
ROTATED_SHARE = 0.5  # default partial_rotary_factor
QKV = ("q", "k", "v")  # order in the fused matrix, within each head
FUSED_QKV = "query_key_value"
NAMES = {"o": "self_attn.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
HEAD_NORMS = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=16_384, bos=1, eos=(2,), act=("hidden_act", "relu2"), grouped=False, eps_key="layer_norm_eps",
                    norm_eps=1e-5, sizes=SIZES, rope={"partial": True, "share": ROTATED_SHARE})
    return decoder_config(keys, base, qkv_bias=True, o_bias=True, mlp_bias=True, norm_kind="layer",
                          qk_norm=keys.flag("qk_layernorm", True))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, as the store splits them: no gate, and a bias for each matrix and norm."""
    rules, prefix = llama.layer_tensors(config, layer), f"model.layers.{layer}."
    rules = {role: rule for role, rule in rules.items() if role != "gate" and not role.endswith("_bias")}
    for role, name in NAMES.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", rules[role].shape)
    for role, name in HEAD_NORMS.items() if config.qk_norm else ():
        rules[role] = TensorRule(f"{prefix}self_attn.{name}.weight", rules[role].shape)
    return rules | {f"{role}_bias": bias_rule(rule) for role, rule in rules.items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules, norm = llama.outer_tensors(config), TensorRule("model.final_layernorm.weight", (config.hidden_size,))
    return rules | {"norm": norm, "norm_bias": bias_rule(norm)}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Names of a layer's q, k and v, and of their biases -> the fused tensor, and their rows of it, which has q, k and v head by head."""
    prefix, (heads, head_dim) = f"model.layers.{layer}.self_attn.", (config.num_attention_heads, config.head_dim)
    rows = np.arange(heads * len(QKV) * head_dim).reshape(heads, len(QKV), head_dim)
    return {f"{prefix}{role}_proj.{kind}": (f"{prefix}{FUSED_QKV}.{kind}", rows[:, i].reshape(-1))
            for i, role in enumerate(QKV) for kind in ("weight", "bias")}
