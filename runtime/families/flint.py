"""Flint: Qwen 3's MoE with attention sinks, RoPE only in sliding-window layers (the others have full attention and no positions), plain
sigmoid routing and a shared expert."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from . import TensorRule
from .mixtral import expert_tensors, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

REFUSED_UNLESS = {"mlp_bias": False, "qkv_bias": False}
SIZES = {"vocab_size": 150_144, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 49, "num_attention_heads": 32}
WINDOW, DENSE = 513, (0, 1)


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=262_144, num_key_value_heads=4, head_dim=128, sizes=SIZES)
    layers, bias = base.size(keys, "num_hidden_layers"), keys.flag("attention_bias", False)
    usual = [GLOBAL if i < 2 or i % 4 == 1 or i == layers - 1 else LOCAL for i in range(layers)]
    windows = layer_windows(keys, keys.integer("sliding_window", WINDOW), usual)

    listed = keys.layers("mlp_only_layers", layers)
    dense = DENSE if keys.raw.get("mlp_only_layers") is None else listed
    step = keys.integer("decoder_sparse_step", 1, high=2048)
    sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
    moe = moe_config(keys, 256, 6, keys.integer("moe_intermediate_size", 512, high=2**22), keys.flag("norm_topk_prob", True), sparse,
                     sigmoid=True, shared_expert_dim=keys.integer("shared_expert_intermediate_size", 1024, high=2**22))
    rotary_layers = [window is not None for window in windows]
    return decoder_config(keys, base, windows=windows, rotary_layers=rotary_layers, qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: sinks are called an offset."""
    prefix = f"model.layers.{layer}.self_attn."
    return {**expert_tensors(config, layer, "mlp", NAMES, "shared_expert"),
            "sinks": TensorRule(f"{prefix}softmax_offset", (config.num_attention_heads,), also=(f"{prefix}sinks",))}
