"""Attention and MLP blocks shared by several layers (Zamba 2), and each layer's own additions.

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

BLOCKS, LENT_OUT, ATTENTION = "blocks.", "lent_out", ("q", "k", "v")
MATRICES = (*ATTENTION, "o", "gate", "up", "down")
WIDE = ("gate_wide", "up_wide")


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


def shared_blocks(found: RoleSource) -> tuple[SharedBlock, ...]:
    """The shared blocks, from tensors outside the layers."""
    made = []
    for number in range(found.config.num_shared_blocks):
        own = {role: found.linear(block_role(number, role)) for role in MATRICES}
        made.append(SharedBlock(found.norm(block_role(number, "input_norm")), mlp_norm=found.norm(block_role(number, "post_norm")), **own))
    return tuple(made)


def block_of_layer(found: RoleSource, blocks: Sequence[SharedBlock]) -> SharedBlockUse:
    """The shared block as this layer uses it."""
    beside = [made for role in ATTENTION if (made := found.low_rank(f"{role}_low", f"{role}_wide")) is not None]
    into, block = found.linear("mlp_low"), blocks[block_of(found.config, found.layer)]
    return SharedBlockUse(block, tuple(beside), tuple(LowRank(into, found.linear(role)) for role in WIDE), found.linear(LENT_OUT))
