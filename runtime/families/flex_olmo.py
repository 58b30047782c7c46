"""FlexOlmo (7x7B): OLMo 2's block with post-norms, and independently trained experts in place of the MLP."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, olmo2
from .mixtral import moe_config, moe_tensors
from .qwen3_moe import NAMES

REFUSED_UNLESS = {"clip_qkv": None, "layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 100_352, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=4096, eos=(100_257,), theta=500_000.0, sizes=SIZES)
    layers, ffn = (base.size(keys, name) for name in ("num_hidden_layers", "intermediate_size"))
    bias = keys.flag("attention_bias", False)
    moe = moe_config(keys, 7, 5, ffn, keys.flag("norm_topk_prob", False), range(layers), parallel_to_mlp=True)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_full_width=True, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = {role: rule for role, rule in olmo2.layer_tensors(config, layer).items() if role not in NAMES}
    return rules | moe_tensors(config, f"model.layers.{layer}.mlp.", NAMES)
