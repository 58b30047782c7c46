"""K-EXAONE: EXAONE 4's attention (RoPE only in windowed layers) with pre-norms, and DeepSeek V3's MoE with one shared expert in all
layers but the first."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule
from .deepseek_v3 import with_expert_groups
from .exaone4 import default_layer_types
from .glm4_moe_lite import sparse_layers
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

# is_moe_layer repeats which layers have experts.
KEYS_HARMLESS = frozenset({"is_moe_layer"})
REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
SIZES = {"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32, "num_attention_heads": 32}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=2048, num_key_value_heads=32, bos=1, eos=(53,), norm_eps=1e-5, sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    windows = layer_windows(keys, window, default_layer_types(keys, layers, window))

    width, earlier = keys.integer("moe_intermediate_size", 1024, high=2**22), keys.integer("first_last_k_dense_replace", 1, low=0)
    first = keys.integer("first_k_dense_replace", min(earlier, layers), low=0, high=layers)
    sparse = range(first, layers) if keys.strings("mlp_layer_types", layers) is None else sparse_layers(keys, layers)
    moe = moe_config(keys, 64, 8, width, keys.flag("norm_topk_prob", True), sparse, sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("routed_scaling_factor", 2.5),
                     shared_expert_dim=width * keys.integer("num_shared_experts", 1, high=MAX_EXPERTS))
    rotary_layers = [window is None or layer_window is not None for layer_window in windows]
    return decoder_config(keys, base, windows=windows, rotary_layers=rotary_layers, qk_norm=True, moe=with_expert_groups(keys, moe, 1, 1),
                          mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """The correction lies beside the router in the published ones."""
    rules = expert_tensors(config, layer, "mlp", NAMES, correction="e_score_correction_bias")
    if "correction" in rules:
        inside = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        rules["correction"] = replace(rules["correction"], also=(inside,))
    return rules
