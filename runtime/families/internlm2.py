"""InternLM 2 and 2.5 (1.8B, 7B, 20B): the Llama block with fused QKV, interleaved by KV group: the group's queries, its key, its value.
The store splits it (`tensor_views.py`)."""

from __future__ import annotations

import numpy as np

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map

REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 103_168, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}
CODE = r"(configuration|modeling)_internlm2\.InternLM2\w+"  # auto_map of published checkpoints; their code is not run
# Llama's names -> those of checkpoints. q, k and v, once split, have Llama's.
NAMES = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj":
         "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
OUTER_NAMES = {"embed": "model.tok_embeddings.weight", "head": "output.weight"}
FUSED_QKV = "attention.wqkv"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=2048, bos=1, eos=(2,), sizes=SIZES)
    bias = keys.flag("bias", True)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    prefix = f"model.layers.{layer}."
    rules = {}
    for role, rule in llama.layer_tensors(config, layer).items():
        name, _, kind = rule.name.removeprefix(prefix).rpartition(".")
        rules[role] = TensorRule(f"{prefix}{NAMES.get(name, name)}.{kind}", rule.shape)
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return {role: TensorRule(OUTER_NAMES.get(role, rule.name), rule.shape) for role, rule in llama.outer_tensors(config).items()}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Names of a layer's q, k and v, and of their biases -> the stored tensor that contains them, and their rows of it."""
    prefix, groups = f"model.layers.{layer}.", config.num_key_value_heads
    queries = config.num_attention_heads // groups
    rows = np.arange(groups * (queries + 2) * config.head_dim).reshape(groups, queries + 2, config.head_dim)
    parts = {"q_proj": rows[:, :queries], "k_proj": rows[:, queries], "v_proj": rows[:, queries + 1]}
    return {f"{prefix}self_attn.{name}.{kind}": (f"{prefix}{FUSED_QKV}.{kind}", part_rows.reshape(-1))
            for name, part_rows in parts.items() for kind in ("weight", *(("bias",) if config.qkv_bias else ()))}
