"""The last layers of a prompt, which run only for its last tokens.

The head reads only the last token of a prompt. So behind the last layer that stores keys and values or a state, the other tokens do not
matter: neither their attention output nor their MLP, nor any later layer that reads earlier layers' keys and values (a third of the layers
or more in Gemma 3n, Gemma 4 E2B and E4B). A few tokens are kept with the last one, so that the same kernels run as for a long pass: no bit
depends on this.
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
    """How many tokens of a pass run through the last layers, if states of the last `wanted` are needed; None: all."""
    return None if wanted is None or tokens <= max(KEPT, wanted) else max(KEPT, wanted)


def first_alone(config: ModelConfig) -> int:
    """The first of the last layers, which store nothing of the text; the number of layers if the last one does."""
    return config.last_stateful_layer + 1


def narrows(config: ModelConfig, layer: int) -> bool:
    """Does a layer continue with the last tokens only, after storing keys and values of all?"""
    own = families.get(config.family).block in NARROWING
    return layer >= first_alone(config) or own and layer == config.last_stateful_layer


def spares(config: ModelConfig, layer: int, role: str) -> bool:
    """Does a matrix of a layer run only for the last tokens of a prompt?"""
    return narrows(config, layer) and (layer >= first_alone(config) or families.base_role(role) in BEHIND)


def attending_alone(config: ModelConfig) -> int:
    """How many of the last attention layers run only for the last tokens of a prompt."""
    return sum(config.has_attention(layer) and narrows(config, layer) for layer in range(config.num_hidden_layers))
