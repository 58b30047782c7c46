"""Qwen 3.5 MoE (35B-A3B, 122B-A10B, 397B-A17B), text: the Qwen 3.5 block with many small experts and a shared one in every layer."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig
from ..config_reader import Keys
from . import TensorRule, qwen3_5_text
from .mixtral import expert_tensors, moe_config
from .qwen3_5_text import hybrid_config, hybrid_tensors
from .qwen3_moe import NAMES

LIKE = qwen3_5_text
KEYS_HARMLESS = qwen3_5_text.KEYS_HARMLESS - {"mlp_only_layers"} | {"intermediate_size"}
REFUSED_UNLESS = {**qwen3_5_text.REFUSED_UNLESS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
EXPERT_DIM = 512


def config(keys: Keys) -> ModelConfig:
    return moe_hybrid_config(keys, experts=256, per_token=8)


def moe_hybrid_config(keys: Keys, experts: int, per_token: int, mtp_layers: int = 0) -> ModelConfig:
    """The config of a Qwen 3.5 MoE. `experts`, `per_token`, `mtp_layers`: defaults of the number of experts, of those that a token visits,
    and of MTP layers."""
    layers, high = keys.integer("num_hidden_layers", high=MAX_LAYERS), 2**22
    moe = moe_config(keys, experts, per_token, keys.integer("moe_intermediate_size", EXPERT_DIM, high=high), True, range(layers),
                     shared_expert_dim=keys.integer("shared_expert_intermediate_size", EXPERT_DIM, high=high), shared_expert_gate=True)
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=2, head_dim=256, ffn_key="moe_intermediate_size",
                    sizes={"moe_intermediate_size": EXPERT_DIM})
    return hybrid_config(keys, base, mtp_layers, moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return hybrid_tensors(config, layer, expert_tensors(config, layer, "mlp", NAMES, shared="shared_expert"))
