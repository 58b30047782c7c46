"""OLMoE: the Llama block with 64 experts, and QK norms over the whole width before RoPE."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule
from .mixtral import expert_tensors, moe_config
from .qwen3_moe import NAMES

REFUSED_UNLESS = {"clip_qkv": None, "layer_types": None, "mlp_bias": False, "sliding_window": None}


def config(keys: Keys) -> ModelConfig:
    layers, bias = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.flag("attention_bias", False)
    moe = moe_config(keys, 64, 8, keys.integer("intermediate_size", high=2**22), keys.flag("norm_topk_prob", False), range(layers))
    base = Defaults(max_position_embeddings=4096, bos=None, eos=(50279,), norm_eps=1e-5)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_full_width=True, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "mlp", NAMES)
