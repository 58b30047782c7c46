"""MiniMax M2: Mixtral's names, corrected sigmoid routing, QK norms over the whole width, and RoPE on half of each head."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, rope_config
from . import TensorRule
from .deepseek_v3 import check_auto_map
from .mixtral import NAMES, expert_tensors, moe_config

# Training, leftovers of MiniMax Text-01, and multi-token prediction, whose weights are not published.
KEYS_HARMLESS = frozenset({
    "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
    "mtp_transformer_layers", "num_mtp_modules", "router_jitter_noise", "shared_moe_mode", "use_mtp"})
REFUSED_UNLESS = {
    "attention_bias": False, "layer_types": None, "mlp_bias": False, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "sliding_window": None, "use_qk_norm": True, "use_routing_bias": True}
CODE = r"(configuration|modeling)_minimax_m2\.MiniMaxM2\w+"  # auto_map of published checkpoints; part of transformers now
SIZES = {"vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48}
THETA = 5e6


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=196_608, num_key_value_heads=8, head_dim=128, bos=200_034, eos=(200_020,), sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    kinds = keys.flags("attn_type_list", layers)
    if kinds is not None and not all(kinds):
        raise ConfigError("config.json: attn_type_list has layers of linear attention, which is not supported for minimax_m2 models",
                          "MiniMax M2 has none: the config is another model's")

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        share = keys.integer("rotary_dim", head_dim, low=2, high=head_dim) / head_dim
        return (rope_config(keys, head_dim, positions, THETA, partial=True, share=share),) * layers

    moe = moe_config(keys, 256, 8, base.size(keys, "intermediate_size"), True, range(layers), sigmoid=True, correction_bias=True)
    return decoder_config(keys, base, ropes, qk_norm=True, qk_norm_full_width=True, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "block_sparse_moe", NAMES, correction="e_score_correction_bias")
