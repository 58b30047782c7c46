"""GLM-5: DeepSeek V3.2's attention in GLM's sizes, some of whose layers share the choice of the one before. It runs as far as that chooses
all tokens."""

from __future__ import annotations

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import deepseek_v32
from .deepseek_v32 import NAMES, block, indexed_config, layer_tensors, outer_tensors

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "NAMES", "REFUSED_UNLESS", "block", "config", "layer_tensors", "outer_tensors"]

KEYS_USED, KEYS_HARMLESS, REFUSED_UNLESS = deepseek_v32.KEYS_USED, deepseek_v32.KEYS_HARMLESS, deepseek_v32.REFUSED_UNLESS
SIZES = {"vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288, "num_hidden_layers": 78, "num_attention_heads": 64}
WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=202_752, norm_eps=1e-5, sizes=SIZES, bos=0, eos=(1,))
    return indexed_config(keys, base, WIDTHS, 2048, (1, 1))
