"""Jais 2 (8B, 70B): OPT's block with RoPE, squared ReLU in its MLP, and biases everywhere."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama, opt, stablelm
from .stablelm import with_norm_biases

LIKE = opt
outer_tensors = stablelm.outer_tensors
KEYS_HARMLESS = frozenset({"rms_norm_eps"})
REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}
SIZES = {"vocab_size": 150_272, "hidden_size": 3328, "intermediate_size": 26_624, "num_hidden_layers": 32, "num_attention_heads": 26}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", True)
    base = Defaults(max_position_embeddings=8192, bos=0, eos=(150_024,), eps_key="layer_norm_eps", norm_eps=1e-5,
                    act=("hidden_act", "relu2"), sizes=SIZES)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias", True), norm_kind="layer")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return with_norm_biases({role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in ("gate", "gate_bias")})
