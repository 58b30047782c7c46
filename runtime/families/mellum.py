"""Mellum 2 (12B-A2.5B): Qwen 3's MoE with separate RoPE parameters for windowed layers."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import RopeConfig, ropes_by_window
from . import qwen3_moe
from .glm4_moe_lite import SPARSE, sparse_layers_of
from .mixtral import moe_config
from .qwen2 import layer_windows

LIKE = qwen3_moe
# Keys of MTP layers, which are not loaded.
KEYS_HARMLESS = frozenset({"mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers", "num_nextn_predict_layers",
                           "original_max_position_embeddings"})
REFUSED_UNLESS = {"decoder_sparse_step": 1, "mlp_bias": False, "mlp_only_layers": [], "use_sliding_window": True}
SIZES = {"vocab_size": 98_304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28, "num_attention_heads": 32}
THETAS = 500_000.0, 10_000.0  # of layers without and with a window, if the config states none


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, head_dim=128, sizes=SIZES)
    layers, bias = base.size(keys, "num_hidden_layers"), keys.flag("attention_bias", False)
    windows = layer_windows(keys, keys.integer("sliding_window", None if keys.has("sliding_window") else 1024),
                            ["full_attention"] * layers)
    sparse = sparse_layers_of(keys.strings("mlp_layer_types", layers) or (SPARSE,) * layers)
    moe = moe_config(keys, 64, 8, keys.integer("moe_intermediate_size", 896, high=2**22), keys.flag("norm_topk_prob", True), sparse)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        theta = keys.number("rope_theta", None, above=1.0)
        return ropes_by_window(keys, head_dim, positions, THETAS if theta is None else (theta, theta), windows)

    return decoder_config(keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe)
