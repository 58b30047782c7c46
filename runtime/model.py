"""A model: tensors by role, blocks on their backends, one forward pass.

Shapes and types are checked against the config before a byte of weights is read. A block runs on the backend of its placement;
activations cross through the host where two neighbours differ. Weights are leased layer by layer even when all are resident, so
that a pager that streams them changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..kernels.workspace import Dims
from ..offload.checkpoint import CheckpointError, TensorInfo, TensorStore
from ..offload.memory import anonymous
from ..offload.pager import ResidentPager
from ..quant.spec import QuantSpec
from ..quant.weight import RAW_NUMPY, Expert, Linear, Norm, Weight, to_f32
from . import families
from .cache import AttnSpec, KVCache
from .config import ModelConfig
from .container import Container
from .families import LayerWeights, TensorRule, expert_of, expert_role
from .rope import RopeTable, rope_table

SCHEMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
Tap = Callable[[str, int, object], None]


def no_tap(name: str, layer: int, value: object) -> None:
    """The tap of a run that records nothing."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model: where its bytes are, what they mean, and the shape of the weight."""

    info: TensorInfo
    spec: QuantSpec
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def nbytes(self) -> int:
        return self.info.nbytes


def check_tensors(config: ModelConfig, store: TensorStore, container: Container | None = None) -> dict[int | str, dict[str, ModelTensor]]:
    """The tensors of each layer (and "outer") by role. Raises CheckpointError for one that is missing or has another shape or type."""
    family = families.get(config.family)
    low_bit = {} if container is None else {name: stored for name, stored in container.tensors.items() if not stored.spec.is_raw}
    groups: dict[int | str, dict[str, TensorRule]] = {"outer": family.outer_tensors(config)}
    groups |= {i: family.layer_tensors(config, i) for i in range(config.num_hidden_layers)}
    found: dict[int | str, dict[str, ModelTensor]] = {}
    for key, rules in groups.items():
        found[key] = {}
        for role, rule in rules.items():
            info = store.tensors.get(rule.name)
            if info is None:
                raise CheckpointError(f"tensor {rule.name} is missing",
                                      "the config and the weights are of different models, or the download is incomplete")
            stored = low_bit.get(rule.name)
            shape = tuple(info.shape if stored is None else stored.shape)
            if shape != tuple(rule.shape):
                raise CheckpointError(f"tensor {rule.name} has shape {list(shape)}, the config says {list(rule.shape)}",
                                      "the config and the weights are of different models")
            if stored is None and info.dtype not in SCHEMES:
                raise CheckpointError(f"tensor {rule.name} is {info.dtype}; this version reads {', '.join(SCHEMES)}")
            if stored is not None and info.nbytes != stored.nbytes:
                raise CheckpointError(f"tensor {rule.name} has {info.nbytes} bytes, {stored.spec} of {list(shape)} takes {stored.nbytes}",
                                      "quantize the model again")
            found[key][role] = ModelTensor(info, QuantSpec.raw(SCHEMES[info.dtype]) if stored is None else stored.spec, shape)
    return found


def attention_specs(config: ModelConfig) -> list[AttnSpec]:
    """Each layer's attention."""
    return [AttnSpec(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim**-0.5, window)
            for window in config.windows]


def dims(config: ModelConfig, ctx: int, chunk: int, rows: int) -> Dims:
    """The widths that size a workspace."""
    own = config.mixture
    mixture = (own.experts, own.per_token, own.width) if own and own.layers else (0, 0, 0)
    return Dims(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                max(config.intermediate_size, mixture[2]), config.vocab_size, min(chunk, ctx), ctx, rows, *mixture)


class Model:
    """`backends` maps device names to ops; `devices` names each layer's. The embedding and the head run on the host's backend."""

    def __init__(self, config: ModelConfig, store: TensorStore, devices: Sequence[str], backends: Mapping[str, object], ctx: int,
                 mmap: bool = False, container: Container | None = None) -> None:
        self.config, self.store, self.devices, self.backends = config, store, tuple(devices), backends
        self.tensors = check_tensors(config, store, container)
        self.rope: RopeTable | None = rope_table(config.rope, config.head_dim, ctx, config.max_position_embeddings)
        host = {key: [tensor.info for tensor in roles.values()] for key, roles in self.tensors.items()
                if key == "outer" or devices[key] == "cpu"}
        self.pager = ResidentPager(store, host, mmap=mmap)
        self.block = families.get(config.family).block
        self.looked_up: set[str] = set()  # tensors whose codes lie in lookup order in the pager's memory (`lookup.py`)
        self._wrapped: dict[int | str, tuple[Mapping[str, np.ndarray], object]] = {}
        self._on_device: dict[int, LayerWeights] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of weights, on every tier."""
        return sum(info.nbytes for roles in self.tensors.values() for info in roles.values())

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that one token reads: all but an embedding table that is not the head too and experts that it does not visit."""
        outer, own = self.tensors["outer"], self.config.mixture
        nbytes = self.nbytes - (outer["embed"].nbytes if "head" in outer else 0)
        experts = sum(tensor.nbytes for roles in self.tensors.values() for role, tensor in roles.items() if expert_of(role) is not None)
        return nbytes - (experts * (own.experts - own.per_token) // own.experts if experts else 0)

    @property
    def bits_per_value(self) -> float:
        """Stored bits over parameters."""
        return 8 * self.nbytes / parameters(self.tensors)

    def load(self) -> Iterator[tuple[int, int]]:
        """Read the weights; yields (bytes done, bytes in total)."""
        total, done = self.nbytes, 0
        for done, _ in self.pager.load():
            yield done, total
        for layer, device in enumerate(self.devices):
            if device != "cpu":
                roles = self.tensors[layer]
                raw = {tensor.name: self.store.read(tensor.info) for tensor in roles.values()}
                self._on_device[layer] = self._layer_weights(roles, raw, self.backends[device])
                done += sum(info.nbytes for info in roles.values())
                yield done, total

    def close(self) -> None:
        self._wrapped.clear()
        self._on_device.clear()
        self.pager.close()
        self.store.close()

    # -- weights ---------------------------------------------------------------------------------------------------------------

    def _layer_weights(self, roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray], ops: object,
                       looked_up: Collection[str] = ()) -> LayerWeights:
        """Wrap raw bytes as the records that a block takes."""
        config = self.config

        def vector(role: str) -> object | None:
            return None if role not in roles else ops.put(_vector(roles[role], raw), "f32")

        def linear(role: str) -> Linear | None:
            if (tensor := roles.get(role)) is None:
                return None
            data = ops.put(_typed(raw[tensor.name], tensor.spec), tensor.spec.scheme)
            shaped = data.reshape(tensor.shape) if tensor.spec.is_raw else data
            return Linear(Weight(tensor.spec, tensor.shape, {"data": shaped}, tensor.name in looked_up), vector(f"{role}_bias"))

        def norm(role: str) -> Norm | None:
            return None if role not in roles else Norm(config.norm_kind, vector(role), vector(f"{role}_bias"), config.norm_eps)

        experts = tuple(Expert(*(linear(expert_role(expert, role)) for role in ("gate", "up", "down")))
                        for expert in range(config.mixture.experts if "router" in roles else 0))
        return LayerWeights(input_norm=norm("input_norm"), q=linear("q"), k=linear("k"), v=linear("v"), q_norm=norm("q_norm"),
                            k_norm=norm("k_norm"), o=linear("o"), post_norm=norm("post_norm"), gate=linear("gate"), up=linear("up"),
                            down=linear("down"), router=linear("router"), experts=experts)

    def read_layer(self, layer: int) -> LayerWeights:
        """A layer's weights straight from the store, for a pass that goes layer by layer; `load` need not have run. The host's."""
        raw = {tensor.name: anonymous(tensor.nbytes) for tensor in self.tensors[layer].values()}
        for tensor in self.tensors[layer].values():
            self.store.read_into(tensor.info, raw[tensor.name])
        return self._layer_weights(self.tensors[layer], raw, self.backends["cpu"])

    def read_norm(self) -> Norm:
        """The norm before the head, straight from the store."""
        tensor = self.tensors["outer"]["norm"]
        return Norm(self.config.norm_kind, _vector(tensor, {tensor.name: self.store.read(tensor.info)}), None, self.config.norm_eps)

    def read_rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of an unquantized embedding straight from the store, float32 [T, D]."""
        tensor = self.tensors["outer"]["embed"]
        distinct, places = np.unique(ids, return_inverse=True)
        rows = np.concatenate([self.store.read(tensor.info, int(row), int(row) + 1) for row in distinct])
        return to_f32(_typed(rows, tensor.spec), tensor.spec.scheme).reshape(len(distinct), -1)[places]

    def _outer(self, raw: Mapping[str, np.ndarray]) -> tuple[Weight, Norm, Linear]:
        roles, host = self.tensors["outer"], self.backends["cpu"]

        def weight(role: str) -> Weight:
            tensor = roles[role]
            make = Weight.raw if tensor.spec.is_raw else Weight.low_bit
            return make(tensor.spec.scheme if tensor.spec.is_raw else tensor.spec, tensor.shape, raw[tensor.name])

        norm = Norm(self.config.norm_kind, host.put(_vector(roles["norm"], raw), "f32"), None, self.config.norm_eps)
        embed = weight("embed")
        return embed, norm, Linear(weight("head") if "head" in roles else embed)

    def _lease(self, key: int | str, raw: Mapping[str, np.ndarray]) -> object:
        """Records over leased memory; made once while the memory stays where it is."""
        if key not in self._wrapped or self._wrapped[key][0] is not raw:
            made = self._outer(raw) if key == "outer" else self._layer_weights(self.tensors[key], raw, self.backends["cpu"], self.looked_up)
            self._wrapped[key] = (raw, made)
        return self._wrapped[key][1]

    def find_nan(self) -> str | None:
        """The name of a tensor that holds NaN or infinity, if one does."""
        for roles in self.tensors.values():
            for tensor in roles.values():
                raw = {tensor.name: self.store.read(tensor.info)}
                low = None if tensor.spec.is_raw else Weight.low_bit(tensor.spec, tensor.shape, raw[tensor.name])
                values = _vector(tensor, raw) if low is None else low.to_f32()
                if not np.isfinite(values).all():
                    return tensor.name
        return None

    # -- forward ---------------------------------------------------------------------------------------------------------------

    def forward(self, ids: np.ndarray, cache: KVCache, tap: Tap = no_tap) -> np.ndarray:
        """Run `ids` int64 [T] after what is cached; returns the last hidden states on the host, float32 [T, D], before the final norm."""
        step = cache.begin(len(ids))
        host = self.backends["cpu"]
        if tap is not no_tap:
            tap = _after_flush(host, tap)
        with host.together():
            here, ops = "cpu", host
            with self.pager.lease("outer") as raw:
                x = ops.embed(ids, self._lease("outer", raw)[0])
            for layer, device in enumerate(self.devices):
                if device != here:
                    x, here, ops = self.backends[device].from_host(ops.to_host(x)), device, self.backends[device]
                if device == "cpu":
                    with self.pager.lease(layer) as raw:
                        w = self._lease(layer, raw)
                        x = self.block(ops, w, x, cache.layer(layer), step.positions, self.rope, self.config, layer, tap)
                        if not self.pager.resident:  # its memory may go when the lease ends
                            host.flush()
                else:
                    w = self._on_device[layer]
                    x = self.block(ops, w, x, cache.layer(layer), step.positions, self.rope, self.config, layer, tap)
            if here != "cpu":
                x = host.from_host(ops.to_host(x))
        cache.commit()
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Scores for hidden states `[T, D]` -> float32 `[T, V]`, a view of the workspace."""
        with self.pager.lease("outer") as raw:
            _, norm, head = self._lease("outer", raw)
            return self.backends["cpu"].logits(x, norm, head)


def _after_flush(host: object, tap: Tap) -> Tap:
    """A tap that sees what the ops before it have computed, not what they will."""

    def see(name: str, layer: int, value: object) -> None:
        host.flush()
        tap(name, layer, value)

    return see


def _typed(raw: np.ndarray, spec: QuantSpec) -> np.ndarray:
    return raw.view(RAW_NUMPY[spec.scheme]) if spec.is_raw else raw


def _vector(tensor: ModelTensor, raw: Mapping[str, np.ndarray]) -> np.ndarray:
    """A raw tensor as float32, flat."""
    return to_f32(_typed(raw[tensor.name], tensor.spec), tensor.spec.scheme)


def parameters(tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> int:
    """Number of parameters."""
    return sum(prod(tensor.shape) for roles in tensors.values() for tensor in roles.values())
