"""Blocks of attention and an MLP that layers share (Zamba 2), and what each of these layers has beside the one that it is lent.

The blocks are outside the layers (roles `blocks.<number>.<role>`), so they are in memory once and stay there from the disk too: a token
reads each of them several times. What a layer adds to one lies with the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...quant.weight import Lent, Linear, LowRank, Norm, SharedBlock, Weight
from ..tensors import ModelTensor, as_float32, typed

if TYPE_CHECKING:
    import numpy as np

    from ..adapters.adapted import Adapted
    from ..config import ModelConfig

BLOCKS, LENT_OUT, ATTENTION = "blocks.", "lent_out", ("q", "k", "v")
MATRICES = (*ATTENTION, "o", "gate", "up", "down")
WIDE = ("gate_wide", "up_wide")


def block_role(block: int, role: str) -> str:
    """The role of a tensor of a shared block."""
    return f"{BLOCKS}{block}.{role}"


def blocks_of(roles: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    """The tensors of shared blocks among those outside the layers."""
    return {role: tensor for role, tensor in roles.items() if role.startswith(BLOCKS)}


def block_of(config: ModelConfig, layer: int) -> int:
    """The block that a layer is lent: they take turns."""
    return config.attends_beside.index(layer) % config.shared_blocks


def uses(config: ModelConfig, role: str) -> int:
    """How often a token reads a tensor outside the layers."""
    if not role.startswith(BLOCKS):
        return 1
    return sum(role.startswith(block_role(block_of(config, layer), "")) for layer in config.attends_beside)


def shared_blocks(config: ModelConfig, roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray], ops: object,
                  adapted: Adapted) -> tuple[SharedBlock, ...]:
    """The blocks on the backend `ops`, of raw bytes by name."""

    def linear(role: str) -> Linear:
        tensor = roles[role]
        data = ops.put(typed(raw[tensor.name], tensor.spec), tensor.spec.scheme)
        shaped = data.reshape(tensor.shape) if tensor.spec.is_raw else data
        return Linear(Weight(tensor.spec, tensor.shape, {"data": shaped}), None, adapted.beside("outer", role, ops))

    def norm(role: str) -> Norm:
        return Norm(config.norm_kind, ops.put(as_float32(roles[role], raw), "f32"), None, config.norm_eps)

    made = []
    for number in range(config.shared_blocks):
        own = {role: linear(block_role(number, role)) for role in MATRICES}
        made.append(SharedBlock(norm(block_role(number, "input_norm")), mlp_norm=norm(block_role(number, "post_norm")), **own))
    return tuple(made)


def lent(config: ModelConfig, layer: int, linear: Callable[[str], Linear | None], blocks: Sequence[SharedBlock]) -> Lent:
    """What a layer has of the block that it is lent; `linear` makes a role's matrix."""
    beside = [LowRank(into, linear(f"{role}_wide")) for role in ATTENTION if (into := linear(f"{role}_low")) is not None]
    into = linear("mlp_low")
    return Lent(blocks[block_of(config, layer)], tuple(beside), tuple(LowRank(into, linear(role)) for role in WIDE), linear(LENT_OUT))
