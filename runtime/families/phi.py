"""Phi 1, 1.5 and 2: parallel attention and ungated MLP under one layer norm, biases everywhere, also on the head, and partial RoPE."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, cohere, llama
from .deepseek_v3 import check_auto_map
from .stablelm import bias_rule

LIKE = cohere
KEYS_HARMLESS = frozenset({"embd_pdrop", "rms_norm_eps"})
REFUSED_UNLESS = {"attention_bias": True, "layer_types": None, "mlp_bias": True, "qk_layernorm": False, "sliding_window": None}
SIZES = {"vocab_size": 51_200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
ROTATED_SHARE = 0.5  # default partial_rotary_factor
CODE = r"(configuration|modeling)_phi\.Phi\w+"  # auto_map of published checkpoints; part of transformers now
NAMES = {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}  # role -> name in checkpoints


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=2048, bos=1, eos=(2,), act=("hidden_act", "gelu_new"), eps_key="layer_norm_eps",
                    norm_eps=1e-5, sizes=SIZES, rope={"partial": True, "share": ROTATED_SHARE})
    return decoder_config(keys, base, qkv_bias=True, o_bias=True, mlp_bias=True, norm_kind="layer")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: no gate, and no norm before the MLP."""
    rules, prefix = llama.layer_tensors(config, layer), f"model.layers.{layer}."
    for role in ("gate", "gate_bias", "post_norm"):
        del rules[role]
    for role, name in NAMES.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", rules[role].shape)
        rules[f"{role}_bias"] = bias_rule(rules[role])
    return rules | {"input_norm_bias": bias_rule(rules["input_norm"])}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules, norm = llama.outer_tensors(config), TensorRule("model.final_layernorm.weight", (config.hidden_size,))
    return rules | {"norm": norm, "norm_bias": bias_rule(norm), "head_bias": TensorRule("lm_head.bias", (config.vocab_size,))}
