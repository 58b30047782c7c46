"""MiMo (7B): Qwen 2's block and an MTP layer (`speculation/mtp_tensors.py`)."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from .deepseek_v3 import check_auto_map
from .qwen2 import qwen_windows

REFUSED_UNLESS = {"attention_bias": True, "mlp_bias": False, "use_mrope": False}
CODE = r"(configuration|modeling)_mimo\.MiMo\w+"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=32)
    return decoder_config(keys, base, windows=qwen_windows(keys), qkv_bias=True,
                          mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))
