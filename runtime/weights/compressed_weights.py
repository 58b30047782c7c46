"""Parameters of layers with compressed keys, and of hyper-connections, as blocks and ops read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...offload.safetensors_header import damaged, shown
from ...quant.compressed_attention_weights import CompressedAttention, Compressor, HyperConnection
from ...quant.weight import Norm

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..tensors import ModelTensor
    from .role_source import RoleSource

HYPER, LEAVES = ("attn_mix", "mlp_mix"), "leave_mix"  # roles of matrices; `_base` and `_scale` belong to them
PICKS = "picks."  # prefix of hash-routing tables' roles, before the layer number


def hyper_weights(found: RoleSource, role: str) -> HyperConnection:
    """Hyper-connection parameters of a branch, or of the merge after the last layer."""
    config = found.config
    return HyperConnection(config.residual_streams, found.ones(config.residual_streams * config.hidden_size), found.linear(role),
                           found.vector(f"{role}_base"),
                 found.vector(f"{role}_scale"), *config.sinkhorn, role == LEAVES)


def hyper_around(found: RoleSource) -> tuple[HyperConnection, ...] | None:
    """Hyper-connections of both branches of a layer, in a model without compressed keys."""
    return tuple(hyper_weights(found, role) for role in HYPER) if found.config.has_hyper_connections else None


def wide_weights(found: RoleSource) -> CompressedAttention | None:
    """Attention of a layer with compressed keys, and the hyper-connections of both branches."""
    config, linear, own = found.config, found.linear, found.config.compressed_attention
    if own is None:
        return None

    def norm(role: str) -> Norm:
        return Norm("rms", found.vector(role), None, config.norm_eps)

    shape, made = own.shapes[found.layer], None
    if shape is not None:
        names = ("key_rows", "key_weights", *(("index_rows", "index_row_weights") if shape.index_dim else ()))
        index = (found.vector("index_bias"), norm("index_norm")) if shape.index_dim else (None, None)
        made = Compressor(tuple(map(linear, names)), found.vector("key_bias"), norm("key_norm"), *index)
    groups = tuple(linear(f"groups.{group}.o_in") for group in range(own.output_groups))
    mixes = tuple(hyper_weights(found, role) for role in HYPER)
    return CompressedAttention(linear("q_a"), norm("q_a_norm"), linear("q_b"), found.ones(config.head_dim), groups, made, *mixes)


def hash_routing(config: ModelConfig, tables: Mapping[int, tuple[ModelTensor, np.ndarray]]) -> dict[int, np.ndarray]:
    """Hash-routed experts: by layer, the experts that each vocabulary entry visits, int64 [V, k], validated. Raises CheckpointError for
    experts that do not exist, or duplicates."""
    own, found = config.moe, {}
    for layer, (tensor, values) in tables.items():
        table = found[layer] = values.reshape(tensor.shape).astype(np.int64)
        if (table != values.reshape(tensor.shape)).any() or table.min() < 0 or table.max() >= own.num_experts:
            damaged(tensor.info.file, f"holds {shown(tensor.name)} of experts beyond the {own.num_experts} there are")
        if own.experts_per_token > 1 and not np.diff(np.sort(table, axis=1), axis=1).all():
            damaged(tensor.info.file, f"holds {shown(tensor.name)}, where a token visits an expert twice")
    return found


def routing_correction(experts: np.ndarray, count: int) -> np.ndarray:
    """A score bias that makes each token choose these experts [T, k] out of `count`: float32 [T, count]."""
    out = np.full((len(experts), count), -np.inf, np.float32)
    np.put_along_axis(out, experts, 0.0, axis=1)
    return out
