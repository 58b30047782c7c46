"""Arcee (AFM): the Llama block with an ungated MLP and squared ReLU, which leaves most neurons at zero."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama, opt

block = opt.block


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=4096, bos=128_000, eos=(128_001,), norm_eps=1e-5, act=("hidden_act", "relu2"))
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias", False))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return {role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in ("gate", "gate_bias")}
