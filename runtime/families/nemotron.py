"""Nemotron (Minitron, Nemotron Mini and 4): layer norms with biases, stored minus one, RoPE on half of each head, and an ungated MLP with
squared ReLU.

The block is OPT's with rotary positions.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama, opt, stablelm
from .stablelm import with_norm_biases

LIKE = opt
outer_tensors = stablelm.outer_tensors
KEYS_HARMLESS = frozenset({"rms_norm_eps"})
ROTATED_SHARE = 0.5  # default partial_rotary_factor
REFUSED_UNLESS = {"layer_types": None, "rope_percent": ROTATED_SHARE, "rope_percentage": ROTATED_SHARE, "sliding_window": None}
SIZES = {"vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 32, "num_attention_heads": 48}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=4096, bos=2, eos=(3,), eps_key="norm_eps", norm_eps=1e-5, act=("hidden_act", "relu2"),
                    sizes=SIZES, rope={"partial": True, "share": ROTATED_SHARE})
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias", False), norm_kind="layer+1")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return with_norm_biases({role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in ("gate", "gate_bias")})
