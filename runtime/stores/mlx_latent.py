"""Rejoins the KV up-projection of latent attention (MLA), which MLX folders store per head in two tensors.

Per head `embed_q` [rank, nope] makes keys, transposed, and `unembed_out` [value, rank] makes values. They are joined into one matrix as
published: a head's key rows, then its value rows, widened like such matrices elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...kernels.latent_shape import LatentShape
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import TensorInfo
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from .. import families
from ..config import ModelConfig
from ..families import TensorRule
from .tensor_views import ViewStore

KEY_WEIGHTS, VALUE_WEIGHTS = "embed_q.weight", "unembed_out.weight"


@dataclass(frozen=True)
class LatentHeads:
    """A joined matrix; see `tensor_views.TensorView`."""

    keys: TensorInfo  # [H * rank, nope]
    values: TensorInfo  # [H * value, rank]
    shape: LatentShape
    at_once: bool = False

    @property
    def source(self) -> TensorInfo:
        return self.values

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return self.values, self.keys

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        shape, rows_per_head = self.shape, self.shape.kv_b_rows
        first, last = begin // rows_per_head, -(-end // rows_per_head)

        def of_heads(info: TensorInfo, rows: int) -> np.ndarray:
            dtype = info.dtype.lower()
            raw = store.read(info, first * rows, last * rows).view(RAW_NUMPY[dtype])
            return to_f32(raw, dtype).reshape(last - first, rows, -1)

        keys, values = of_heads(self.keys, shape.rank).transpose(0, 2, 1), of_heads(self.values, shape.value)
        joined = np.concatenate([keys, values], axis=1).reshape(-1, shape.rank)[begin - first * rows_per_head : end - first * rows_per_head]
        return np.ascontiguousarray(from_f32(joined, self.source.dtype.lower())).reshape(-1).view(np.uint8)


def latent_rules(config: ModelConfig) -> Iterator[TensorRule]:
    """Both parts of every layer, as if they were matrices of the model."""
    for name in _matrix_names(config):
        shape, heads, prefix = config.mla, config.num_attention_heads, name.removesuffix("kv_b_proj.weight")
        yield TensorRule(prefix + KEY_WEIGHTS, (heads * shape.rank, shape.nope), plain=True)
        yield TensorRule(prefix + VALUE_WEIGHTS, (heads * shape.value, shape.rank), plain=True)


def with_heads_joined(store: TensorStore, config: ModelConfig) -> TensorStore:
    """The store with each pair of tensors joined into one matrix. Raises CheckpointError for those of another shape."""
    parts, rules = {}, {rule.name: rule for rule in latent_rules(config)}
    for whole in _matrix_names(config):
        prefix = whole.removesuffix("kv_b_proj.weight")
        components = [store.tensors.get(prefix + name) for name in (KEY_WEIGHTS, VALUE_WEIGHTS)]
        if None in components or whole in store.tensors:
            continue
        if mismatched := next((info for info in components if info.shape != rules[info.name].shape), None):
            expected = list(rules[mismatched.name].shape)
            raise CheckpointError(f"tensor {mismatched.name} has shape {list(mismatched.shape)}, the config says {expected}",
                                  "the config and the weights are of different models")
        parts[whole] = (config.num_attention_heads * config.mla.kv_b_rows, config.mla.rank), LatentHeads(*components, config.mla)
    return ViewStore(store, parts) if parts else store


def _matrix_names(config: ModelConfig) -> Iterator[str]:
    """Name of the joined matrix of each layer."""
    if config.mla is None:
        return
    family = families.get(config.family)
    for layer in range(config.num_hidden_layers):
        rule = family.layer_tensors(config, layer).get("kv_b")
        if rule is not None and rule.name.endswith("kv_b_proj.weight"):
            yield rule.name
