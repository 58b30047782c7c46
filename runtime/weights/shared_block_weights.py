"""Attention and MLP blocks shared by several layers (Zamba 2), and the weights that a layer adds to the block it uses.

Shared blocks are stored outside the layers (roles `blocks.<number>.<role>`), so they are in memory once, and stay there when weights
stream: a token reads each several times. A layer's additions are stored with the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...quant.weight import LowRank, SharedBlock, SharedBlockUse

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..tensors import ModelTensor
    from .role_source import RoleSource

BLOCKS = "blocks."  # prefix of the roles of shared blocks
OUT_ROLE = "lent_out"  # of a layer's output projection; present in layers that use a block
QKV = ("q", "k", "v")
MATRICES = (*QKV, "o", "gate", "up", "down")
MLP_UP_ROLES = ("gate_wide", "up_wide")  # of a layer's low-rank branches of gate and up, which share the matrix "mlp_low"


def block_role(block: int, role: str) -> str:
    """The role of a shared block's tensor."""
    return f"{BLOCKS}{block}.{role}"


def blocks_of(roles: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    """The tensors of shared blocks among those outside the layers."""
    return {role: tensor for role, tensor in roles.items() if role.startswith(BLOCKS)}


def block_of(config: ModelConfig, layer: int) -> int:
    """The shared block that a layer uses; layers alternate between them."""
    return config.hybrid_layers.index(layer) % config.num_shared_blocks


def uses(config: ModelConfig, role: str) -> int:
    """How often a token reads a tensor outside the layers."""
    if not role.startswith(BLOCKS):
        return 1
    return sum(role.startswith(block_role(block_of(config, layer), "")) for layer in config.hybrid_layers)


def shared_blocks(source: RoleSource) -> tuple[SharedBlock, ...]:
    """The shared blocks, from the tensors outside the layers."""
    blocks = []
    for number in range(source.config.num_shared_blocks):
        matrices = {role: source.linear(block_role(number, role)) for role in MATRICES}
        input_norm, mlp_norm = source.norm(block_role(number, "input_norm")), source.norm(block_role(number, "post_norm"))
        blocks.append(SharedBlock(input_norm, mlp_norm=mlp_norm, **matrices))
    return tuple(blocks)


def block_of_layer(source: RoleSource, blocks: Sequence[SharedBlock]) -> SharedBlockUse:
    """The shared block as this layer uses it."""
    qkv_lora = (source.low_rank(f"{role}_low", f"{role}_wide") for role in QKV)
    mlp_down = source.linear("mlp_low")
    gate_up_lora = tuple(LowRank(mlp_down, source.linear(role)) for role in MLP_UP_ROLES)
    block = blocks[block_of(source.config, source.layer)]
    return SharedBlockUse(block, tuple(branch for branch in qkv_lora if branch is not None), gate_up_lora, source.linear(OUT_ROLE))
