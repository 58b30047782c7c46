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

KEYS, VALUES = "embed_q.weight", "unembed_out.weight"


@dataclass(frozen=True)
class Heads:
    """Both parts, rows of heads one above the other, [H * rank, nope] and [H * value, rank]."""

    keys: TensorInfo
    values: TensorInfo
    shape: LatentShape
    at_once: bool = False

    @property
    def source(self) -> TensorInfo:
        return self.values

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return self.values, self.keys

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        own, height = self.shape, self.shape.kv_b_rows
        first, last = begin // height, -(-end // height)

        def of_heads(info: TensorInfo, rows: int) -> np.ndarray:
            kind = info.dtype.lower()
            raw = store.read(info, first * rows, last * rows).view(RAW_NUMPY[kind])
            return to_f32(raw, kind).reshape(last - first, rows, -1)

        keys, values = of_heads(self.keys, own.rank).transpose(0, 2, 1), of_heads(self.values, own.value)
        made = np.concatenate([keys, values], axis=1).reshape(-1, own.rank)[begin - first * height : end - first * height]
        return np.ascontiguousarray(from_f32(made, self.source.dtype.lower())).reshape(-1).view(np.uint8)


def latent_rules(config: ModelConfig) -> Iterator[TensorRule]:
    """Both parts of every layer, as if they were matrices of the model."""
    for whole in _names(config):
        own, heads, before = config.mla, config.num_attention_heads, whole.removesuffix("kv_b_proj.weight")
        yield TensorRule(before + KEYS, (heads * own.rank, own.nope), plain=True)
        yield TensorRule(before + VALUES, (heads * own.value, own.rank), plain=True)


def with_heads_joined(store: TensorStore, config: ModelConfig) -> TensorStore:
    """The store with one matrix in the place of two. Raises CheckpointError for those of another shape."""
    parts, rules = {}, {rule.name: rule for rule in latent_rules(config)}
    for whole in _names(config):
        before = whole.removesuffix("kv_b_proj.weight")
        both = [store.tensors.get(before + name) for name in (KEYS, VALUES)]
        if None in both or whole in store.tensors:
            continue
        if stray := next((info for info in both if info.shape != rules[info.name].shape), None):
            raise CheckpointError(f"tensor {stray.name} has shape {list(stray.shape)}, the config says {list(rules[stray.name].shape)}",
                                  "the config and the weights are of different models")
        parts[whole] = (config.num_attention_heads * config.mla.kv_b_rows, config.mla.rank), Heads(*both, config.mla)
    return ViewStore(store, parts) if parts else store


def _names(config: ModelConfig) -> Iterator[str]:
    """What the matrix of each layer is called."""
    if config.mla is None:
        return
    family = families.get(config.family)
    for layer in range(config.num_hidden_layers):
        rule = family.layer_tensors(config, layer).get("kv_b")
        if rule is not None and rule.name.endswith("kv_b_proj.weight"):
            yield rule.name
