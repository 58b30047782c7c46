"""Model families, one file each; the file's name is the checkpoint's `model_type`.

A family says which config keys it uses, which tensors it has by role, and how a block computes over the ops of a backend. To add
one: a file with the members of `Family`, and its name in FAMILIES (a test compares the list with the folder).

Roles of a layer: input_norm, q, k, v, q_norm, k_norm, o, post_norm, gate, up, down, and `<role>_bias`; of a mixture, instead of the last
three, router and `experts.<number>.<role>`. Outside the layers: embed, norm, head (absent where it is the embedding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..config_reader import ConfigError, Keys, show

if TYPE_CHECKING:
    from ...quant.weight import Expert, Linear, Norm
    from ..cache import LayerCache
    from ..config import ModelConfig
    from ..rope import RopeTable

FAMILIES = ("llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class TensorRule:
    """A tensor that a checkpoint must hold: its name there and its shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerWeights:
    """A layer's parameters on one backend. Biases sit in their `Linear`; `q_norm` and `k_norm` are per head, over head_dim, unless the
    config says otherwise. A layer has either gate, up and down or a router and experts."""

    input_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    post_norm: Norm
    gate: Linear | None
    up: Linear | None
    down: Linear | None
    router: Linear | None = None
    experts: tuple[Expert, ...] = ()


def expert_role(expert: int, role: str) -> str:
    """The role of an expert's gate, up or down."""
    return f"experts.{expert}.{role}"


def expert_of(role: str) -> int | None:
    """The expert that a role belongs to, None for one of the layer."""
    return int(role.split(".")[1]) if role.startswith("experts.") else None


def kind_of(role: str) -> str:
    """A role without its expert: gate for `experts.7.gate`."""
    return role.rpartition(".")[2]


class Family(Protocol):
    """What a module of this folder defines."""

    KEYS_USED: frozenset[str]
    KEYS_HARMLESS: frozenset[str]
    REFUSED_UNLESS: Mapping[str, object]

    def config(self, keys: Keys) -> ModelConfig: ...
    def layer_tensors(self, config: ModelConfig, layer: int) -> dict[str, TensorRule]: ...
    def outer_tensors(self, config: ModelConfig) -> dict[str, TensorRule]: ...
    def block(self, ops: object, w: LayerWeights, x: object, kv: LayerCache, positions: np.ndarray, rope: RopeTable | None,
              config: ModelConfig, layer: int, tap: Callable[[str, int, object], None]) -> object: ...


def get(model_type: str) -> Family:
    """The family of a `model_type`. Raises ConfigError naming it and those that are known."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model type {show(model_type)} is not supported", f"known: {', '.join(FAMILIES)}")
    return import_module(f".{model_type}", __name__)
