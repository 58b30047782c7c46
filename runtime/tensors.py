"""The tensors of a model by layer and role, checked against its config before a byte of weights is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import numpy as np

from ..offload.checkpoint import CheckpointError, TensorInfo, TensorStore
from ..quant.spec import QuantSpec
from ..quant.weight import RAW_NUMPY, to_f32
from . import families
from .config import ModelConfig
from .families import TensorRule
from .sparse.neuron_bundles import bundled_rules
from .speculation.mtp_tensors import stored_mtp_rules
from .stores.container import REQUANTIZE, Container, StoredTensor
from .weights.tied_head import outer_rules

CODES = "codes of a quantized checkpoint whose config.json does not mention them: use the original 16-bit checkpoint"
NO_CODES: Mapping[str, StoredTensor] = MappingProxyType({})
SCHEMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model: where its bytes are, their format, and the shape of the weight.

    If a checkpoint fuses several, `info` is of the part, under the name it would have by itself. `coefficients`: see `TensorRule`. `turn`:
    in a looped layer, the iteration.
    """

    info: TensorInfo
    spec: QuantSpec
    shape: tuple[int, ...]
    coefficients: bool = False
    turn: int = 0

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def used_as(self) -> str:
        """Its name, with the iteration if it is reused."""
        return f"{self.name} (turn {self.turn})" if self.turn else self.name

    @property
    def nbytes(self) -> int:
        return self.info.nbytes

    @property
    def is_matrix(self) -> bool:
        """Is it a matmul operand? All others are used as float32."""
        return len(self.shape) == 2 and not self.coefficients


def check_tensors(config: ModelConfig, store: TensorStore, container: Container | None = None,
                  mtp: bool = False) -> dict[int | str, dict[str, ModelTensor]]:
    """The tensors of each layer (and "outer") by role. Raises CheckpointError for a missing one, or one of another shape or type. `mtp`:
    with those of the MTP layer, if the store has it."""
    family = families.get(config.family)
    low_bit = {} if container is None else {name: stored for name, stored in container.tensors.items() if not stored.spec.is_raw}
    beside = stored_mtp_rules(config, store) if mtp else {}
    groups: dict[int | str, dict[str, TensorRule]] = {"outer": {**outer_rules(config, store.tensors), **beside}}
    groups |= {i: family.layer_tensors(config, i) for i in range(config.num_hidden_layers)}
    found = {key: tensors_of(bundled_rules(rules, container), store, low_bit) for key, rules in groups.items()}
    for layer in range(config.stored_layers, config.num_hidden_layers):
        found[layer] = {role: replace(tensor, turn=layer // config.stored_layers) for role, tensor in found[layer].items()}
    return found


def tensors_of(rules: Mapping[str, TensorRule], store: TensorStore,
               low_bit: Mapping[str, StoredTensor] = NO_CODES) -> dict[str, ModelTensor]:
    """The tensors of rules by role; `low_bit` lists packed ones. Raises CheckpointError for a missing one, or one of another shape or
    type."""
    found: dict[str, ModelTensor] = {}
    for role, rule in rules.items():
        if rule.optional and not {rule.name, *rule.also} & store.tensors.keys():
            continue
        info = _found(rule, store)
        stored = low_bit.get(info.name)
        shape = tuple(info.shape if stored is None else stored.shape)
        if shape != tuple(rule.shape):
            raise _other_shape(info.name, shape, rule.shape)
        if stored is None and info.dtype not in SCHEMES:
            raise CheckpointError(f"tensor {info.name} is {info.dtype}; this version reads {', '.join(SCHEMES)}", CODES)
        if stored is not None and info.nbytes != stored.nbytes:
            raise CheckpointError(f"tensor {info.name} has {info.nbytes} bytes, {stored.spec} of {list(shape)} takes {stored.nbytes}",
                                  REQUANTIZE)
        found[role] = ModelTensor(info, QuantSpec.raw(SCHEMES[info.dtype]) if stored is None else stored.spec, shape, rule.coefficients)
    return found


def with_own_layer(config: ModelConfig, store: TensorStore, container: Container | None = None) -> dict[int | str, dict[str, ModelTensor]]:
    """`check_tensors` with the MTP layer, or without one in an unsupported form: the model runs the same without."""
    try:
        return check_tensors(config, store, container, mtp=True)
    except CheckpointError:
        return check_tensors(config, store, container)


def _found(rule: TensorRule, store: TensorStore) -> TensorInfo:
    """Where a tensor is: under one of its names, or as rows of another. Raises CheckpointError."""
    for name in (rule.name, *rule.also):
        if name in store.tensors:
            return store.tensors[name]
    whole = store.tensors.get(rule.part_of[0]) if rule.part_of else None
    if whole is None:
        raise CheckpointError(f"tensor {rule.part_of[0] if rule.part_of else rule.name} is missing",
                              "the config and the weights are of different models, or the download is incomplete")
    _, first, rows = rule.part_of
    if whole.shape != (rows, *rule.shape[1:]):
        raise _other_shape(whole.name, whole.shape, (rows, *rule.shape[1:]))
    row = whole.nbytes // rows
    return replace(whole, name=rule.name, shape=rule.shape, offset=whole.offset + first * row, nbytes=rule.shape[0] * row)


def _other_shape(name: str, shape: Sequence[int], asked: Sequence[int]) -> CheckpointError:
    return CheckpointError(f"tensor {name} has shape {list(shape)}, the config says {list(asked)}",
                           "the config and the weights are of different models")


def typed(raw: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Raw bytes as values of their type; packed codes as they are."""
    return raw.view(RAW_NUMPY[spec.scheme]) if spec.is_raw else raw


def as_float32(tensor: ModelTensor, raw: Mapping[str, np.ndarray]) -> np.ndarray:
    """A raw tensor as float32, flat."""
    return to_f32(typed(raw[tensor.name], tensor.spec), tensor.spec.scheme)


def parameters(tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> int:
    """Number of parameters."""
    return sum(prod(tensor.shape) for roles in tensors.values() for tensor in roles.values() if not tensor.turn)
