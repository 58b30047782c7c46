"""The last layers of a prompt, which run only for its last tokens.

The head reads only the last token of a prompt. So after the last layer that stores keys and values or a state, the other tokens do not
matter: neither their attention output nor their MLP, nor any later layer that reads earlier layers' keys and values (a third of the layers
or more in Gemma 3n, Gemma 4 E2B and E4B). MIN_LAST_TOKENS continue instead of one, so that the same kernels run as for a long pass and
results are bit-identical.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import families
from .layer import NARROWING

if TYPE_CHECKING:
    from .config import ModelConfig

MIN_LAST_TOKENS = 24  # of a long pass
LAST_TOKEN_ROLES = ("o", "state_out", "gate", "up", "down", "router")  # of matrices that read the output of attention or a state


def num_last_tokens_of(tokens: int, wanted: int | None) -> int | None:
    """How many tokens of a pass run through the last layers, if states of the last `wanted` are needed; None: all."""
    if wanted is None:
        return None
    num_last_tokens = max(MIN_LAST_TOKENS, wanted)
    return num_last_tokens if num_last_tokens < tokens else None


def first_last_token_layer(config: ModelConfig) -> int:
    """The first of the layers at the end that store nothing of the text; the number of layers if there are none."""
    return config.last_stateful_layer + 1


def narrows_to_last_tokens(config: ModelConfig, layer: int) -> bool:
    """Whether a layer continues with the last tokens only, once it has stored keys and values of all."""
    narrows_after_mixing = families.get(config.family).block in NARROWING
    return layer >= first_last_token_layer(config) or narrows_after_mixing and layer == config.last_stateful_layer


def runs_on_last_tokens(config: ModelConfig, layer: int, role: str) -> bool:
    """Whether a matrix of a layer runs only for the last tokens of a prompt."""
    is_last_token_role = layer >= first_last_token_layer(config) or families.base_role(role) in LAST_TOKEN_ROLES
    return is_last_token_role and narrows_to_last_tokens(config, layer)


def num_last_token_attention_layers(config: ModelConfig) -> int:
    """How many of the last attention layers run only for the last tokens of a prompt."""
    return sum(config.has_attention(layer) and narrows_to_last_tokens(config, layer) for layer in range(config.num_hidden_layers))
