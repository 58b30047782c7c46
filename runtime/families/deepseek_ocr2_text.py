"""DeepSeek-OCR's text part, 1 and 2: the Llama block with DeepSeek V2's MoE where the config says so: softmax routing without
renormalisation, beside shared experts."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import REQUIRED, Keys
from . import TensorRule
from .deepseek_v2 import with_topk_method
from .glm4_moe import shared_moe_config
from .glm4_moe_lite import sparse_layers_after
from .mixtral import expert_tensors
from .qwen3_moe import NAMES

# Of training, of whether there is a head, and of latent attention, which the first configs write as nothing.
KEYS_HARMLESS = frozenset({"aux_loss_alpha", "kv_lora_rank", "lm_head", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                           "rm_head", "seq_aux", "v_head_dim"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
                  "sliding_window": None, "use_mla": False}
SIZES = {"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}


def config(keys: Keys) -> ModelConfig:
    return config_with_moe(keys, Defaults(max_position_embeddings=2048, bos=1, eos=(2,), sizes=SIZES), REQUIRED, 1407)


def config_with_moe(keys: Keys, base: Defaults, per_token: object, width: int, **features: object) -> ModelConfig:
    """`per_token` and the `width` inside an expert are defaults; `features` are what the family decides besides."""
    layers = base.size(keys, "num_hidden_layers")
    moe = shared_moe_config(keys, layers, 64, per_token, 0, False, width, 2)
    moe = replace(with_topk_method(keys, moe), layers=sparse_layers_after(keys, layers, 1))
    bias = keys.flag("attention_bias", False)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, moe=moe, **features)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "mlp", NAMES)
