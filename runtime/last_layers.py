"""The last layers of a prompt, which run for its last tokens alone.

What the last layer makes of a token is read by the head, and of a prompt the head reads the last token alone. So nothing matters of the
others behind the last keys and values, or state, that a layer keeps for itself: what they attend to there, what the MLP makes of them, and
all layers behind that, which attend to the keys and values of earlier ones (a third of them or more in Gemma 3n, and in Gemma 4 E2B and
E4B). Some tokens go on with the last one, so that the kernels of long passes multiply it as they would among all: no bit depends on this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import families
from .layer import NARROWING

if TYPE_CHECKING:
    from .config import ModelConfig

KEPT = 24  # tokens of a long pass that go on
BEHIND = ("o", "state_out", "gate", "up", "down", "router")  # roles of matrices behind attention or a state


def kept_of(tokens: int, wanted: int | None) -> int | None:
    """How many of the tokens of a pass go on through the last layers where states of the last `wanted` are asked for; None: all."""
    return None if wanted is None or tokens <= max(KEPT, wanted) else max(KEPT, wanted)


def first_alone(config: ModelConfig) -> int:
    """The first of the last layers, which keep nothing of the text for themselves; how many layers there are, where the last does."""
    return config.last_to_keep + 1


def narrows(config: ModelConfig, layer: int) -> bool:
    """Does a layer go on with the last tokens alone, behind what it keeps of all?"""
    own = families.get(config.family).block in NARROWING
    return layer >= first_alone(config) or own and layer == config.last_to_keep


def spares(config: ModelConfig, layer: int, role: str) -> bool:
    """Does a matrix of a layer multiply the last tokens of a prompt alone?"""
    return narrows(config, layer) and (layer >= first_alone(config) or families.kind_of(role) in BEHIND)


def attending_alone(config: ModelConfig) -> int:
    """How many of the last layers with attention have it for the last tokens of a prompt alone."""
    return sum(config.attends(layer) and narrows(config, layer) for layer in range(config.num_hidden_layers))
