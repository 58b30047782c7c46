"""Weights of compressed attention, of hyper-connections and of hash routing, from a layer's tensors."""

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

# Roles of the matrices of hyper-connections; `_base` and `_scale` are appended for their vectors.
BRANCH_MIXES, FINAL_MIX = ("attn_mix", "mlp_mix"), "leave_mix"
HASH_TABLE = "picks."  # prefix of the roles of hash-routing tables, before the layer number


def hyper_connection(source: RoleSource, role: str) -> HyperConnection:
    """The hyper-connection of a branch, or of the merge after the last layer."""
    config = source.config
    iterations, eps = config.sinkhorn
    return HyperConnection(
        num_streams=config.residual_streams,
        norm=source.constant_norm(config.residual_streams * config.hidden_size),
        proj=source.linear(role),
        base=source.vector(f"{role}_base"),
        scale=source.vector(f"{role}_scale"),
        sinkhorn_iterations=iterations,
        sinkhorn_eps=eps,
        is_final=role == FINAL_MIX,
    )


def layer_hyper_connections(source: RoleSource) -> tuple[HyperConnection, ...] | None:
    """Hyper-connections of both branches of a layer, in a model without compressed attention."""
    return tuple(hyper_connection(source, role) for role in BRANCH_MIXES) if source.config.has_hyper_connections else None


def compressed_attention_weights(source: RoleSource) -> CompressedAttention | None:
    """Compressed attention of a layer, with the hyper-connections of both branches; None in a model without it."""
    config, linear = source.config, source.linear
    if config.compressed_attention is None:
        return None

    def norm(role: str) -> Norm:
        return Norm("rms", source.vector(role), None, config.norm_eps)

    shape, compressor = config.compressed_attention.shapes[source.layer], None
    if shape is not None:
        roles, index_bias, index_norm = ("key_rows", "key_weights"), None, None
        if shape.index_dim:
            roles += ("index_rows", "index_row_weights")
            index_bias, index_norm = source.vector("index_bias"), norm("index_norm")
        compressor = Compressor(tuple(map(linear, roles)), source.vector("key_bias"), norm("key_norm"), index_bias, index_norm)
    groups = tuple(linear(f"groups.{group}.o_in") for group in range(config.compressed_attention.output_groups))
    hyper_connections = (hyper_connection(source, role) for role in BRANCH_MIXES)
    return CompressedAttention(linear("q_a"), norm("q_a_norm"), linear("q_b"), source.constant_norm(config.head_dim), groups, compressor,
                               *hyper_connections)


def hash_routing(config: ModelConfig, tables: Mapping[int, tuple[ModelTensor, np.ndarray]]) -> dict[int, np.ndarray]:
    """Hash routing by layer: the experts of every vocabulary entry, int64 [V, experts_per_token].

    Raises CheckpointError for experts that do not exist, or that an entry has twice.
    """
    moe, routing = config.moe, {}
    for layer, (tensor, values) in tables.items():
        values = values.reshape(tensor.shape)
        table = routing[layer] = values.astype(np.int64)
        if (table != values).any() or table.min() < 0 or table.max() >= moe.num_experts:
            damaged(tensor.info.file, f"holds {shown(tensor.name)} of experts beyond the {moe.num_experts} there are")
        if moe.experts_per_token > 1 and not np.diff(np.sort(table, axis=1), axis=1).all():
            damaged(tensor.info.file, f"holds {shown(tensor.name)}, where a token visits an expert twice")
    return routing


def routing_correction(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """A score bias that makes each token select its `experts` [T, k]: float32 [T, num_experts], 0 for them and -inf elsewhere."""
    correction = np.full((len(experts), num_experts), -np.inf, np.float32)
    np.put_along_axis(correction, experts, 0.0, axis=1)
    return correction
