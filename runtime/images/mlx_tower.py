"""Towers in folders that MLX quantized, converted back to the published layout; mlx-vlm writes those that still contain one.

MLX keeps a tower in 16 bits, stores convolutions channels-last, and renames Qwen's tower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo
from ..stores.tensor_views import ViewStore
from . import MLX_VISION_PREFIXES

OURS = "vision_tower."  # what mlx-vlm calls most towers
EMBEDDINGS = (".patch_embedding.weight", ".patch_embed.proj.weight")
CHANNELS = 3  # of a picture


@dataclass(frozen=True)
class ChannelsFirst:
    """A convolution stored as [out, ..., channels], read as [out, channels, ...]."""

    source: TensorInfo
    at_once: bool = False

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return (self.source,)

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        shape = (end - begin, *self.source.shape[1:])
        values = store.read(self.source, begin, end).view(f"u{self.source.nbytes // int(np.prod(self.source.shape))}").reshape(shape)
        return np.ascontiguousarray(np.moveaxis(values, -1, 1)).reshape(-1).view(np.uint8)


def as_published(store: TensorStore, kind: str) -> TensorStore:
    """The store of an MLX folder of this model type (in MLX_VISION_PREFIXES), with its tower in the published layout."""
    theirs = MLX_VISION_PREFIXES[kind]
    names = ((theirs + name.removeprefix(OURS) if name.startswith(OURS) else name, info) for name, info in store.tensors.items())
    store.tensors = {name: replace(info, name=name) for name, info in names}
    last = {name: info for name, info in store.tensors.items() if name.endswith(EMBEDDINGS) and len(info.shape) in (4, 5)
            and info.shape[-1] == CHANNELS != info.shape[1] and 0 not in info.shape}
    turned = {name: ((info.shape[0], CHANNELS, *info.shape[1:-1]), ChannelsFirst(info)) for name, info in last.items()}
    return ViewStore(store, turned) if turned else store
