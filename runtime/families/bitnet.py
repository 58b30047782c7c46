"""BitNet b1.58 (2B-4T): the Llama block with squared ReLU in its MLP, and sub-norms before o and down.

Its matrices are ternary, with one scale each; `quantization_config` says how a checkpoint packs them (`imported_ternary.py`). Without that
section they are plain tensors.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map

REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 128_256, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20}
CODE = r"(configuration|modeling)_bitnet\.BitNet\w+"  # original code of what transformers has adopted
SUB_NORMS = {"o": "attn_sub_norm", "down": "ffn_sub_norm"}  # matrix -> role of the norm of its input


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=2048, num_key_value_heads=5, bos=128_000, eos=(128_001,), norm_eps=1e-5, theta=500_000.0,
                    act=("hidden_act", "relu2"), sizes=SIZES)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, per_token_scale=True)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, prefix = llama.layer_tensors(config, layer), f"model.layers.{layer}."
    for matrix, part in (("o", "self_attn"), ("down", "mlp")):
        role = SUB_NORMS[matrix]
        rules[role] = TensorRule(f"{prefix}{part}.{role}.weight", (rules[matrix].shape[1],))
    return rules
