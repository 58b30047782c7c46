"""Host layers computed on the GPU for long prompts: their matrices are copied through pinned buffers on a side stream.

One layer is copied while the one before it is used. Keys and values stay in host memory: attention inputs and outputs cross instead, a few
vectors per token. Norms and biases of these layers are small and stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.layout import align

if TYPE_CHECKING:
    from ...kernels.cuda.torch_ops import TorchOps
    from ..cache import LayerCache
    from ..layer import LayerWeights
    from ..tensors import ModelTensor

Roles = Mapping[str, "ModelTensor"]
Lease = Callable[[int], AbstractContextManager[Mapping[str, np.ndarray]]]
Make = Callable[[int, Mapping[str, np.ndarray], object, Callable[["ModelTensor"], object]], "LayerWeights"]


def matrices(roles: Roles) -> list[ModelTensor]:
    """The tensors of a layer that are copied."""
    return [tensor for tensor in roles.values() if tensor.is_matrix]


def buffer_offsets(roles: Roles) -> tuple[dict[str, int], int]:
    """The offset of each matrix in a buffer, and the total bytes."""
    at, found = 0, {}
    for tensor in matrices(roles):
        found[tensor.name] = at
        at = align(at + tensor.nbytes)
    return found, at


@dataclass(frozen=True)
class HostCacheBridge:
    """A layer's host cache, for a block that runs on the GPU."""

    cache: LayerCache
    gpu: TorchOps
    host: object

    def attend(self, q: object, k: object, v: object, sinks: object | None = None) -> object:
        """As `LayerCache.attend`, for GPU tensors."""
        # Held until the host has executed what it queued.
        there = [None if each is None else self.gpu.to_host(each) for each in (q, k, v, sinks)]
        return self.gpu.from_host(self.host.to_host(self.cache.attend(*there)))


class LayerUploader:
    """Uploads host `layers` in the order of a pass; `lease` gives a layer's bytes, `make` its records from its vectors and a function that
    places a matrix. `close` ends its thread."""

    def __init__(self, gpu: TorchOps, layers: Sequence[int], tensors: Mapping[int | str, Roles], lease: Lease, make: Make) -> None:
        self._gpu, self._layers, self._lease, self._make = gpu, tuple(layers), lease, make
        self._places = {layer: buffer_offsets(tensors[layer]) for layer in layers}
        most = max(nbytes for _, nbytes in self._places.values())
        self._targets, self._staged = ([take(most) for _ in range(2)] for take in (gpu.on.take, gpu.on.pinned))
        self._lane = gpu.on.lane()
        self._marks: list[object | None] = [None, None]  # copies into each buffer
        self._used = [self._lane.used()] * 2  # events after the last use of each; initially, after zeroing
        self._made: dict[int, LayerWeights] = {}
        self._thread = ThreadPoolExecutor(1, "effllm-carry")
        self._next: tuple[int, Future] | None = None

    @contextmanager
    def layer(self, layer: int) -> Iterator[LayerWeights]:
        """A layer's weights on the GPU for the duration of the lease; the next layer's copy starts."""
        index = self._layers.index(layer)
        if self._next is None or self._next[0] != index:  # the first of a pass, or after an aborted one
            self._settle()
            self._next = index, self._thread.submit(self._send, index)
        self._next[1].result()
        slot = index % 2
        self._lane.arrive(self._marks[slot])
        following = (index + 1) % len(self._layers)
        self._next = None if following <= index else (following, self._thread.submit(self._send, following))
        if layer not in self._made:
            self._made[layer] = self._records(layer, slot)
        yield self._made[layer]
        self._used[slot] = self._lane.used()

    def _send(self, index: int) -> None:
        """Stage a layer in its pinned buffer and start its copy, in layer order."""
        layer, slot = self._layers[index], index % 2
        if self._marks[slot] is not None:
            self._lane.landed(self._marks[slot])
        at, nbytes = self._places[layer]
        staged = self._staged[slot][:nbytes]
        with self._lease(layer) as raw:
            for name, begin in at.items():
                memory = raw[name].reshape(-1).view(np.uint8)
                staged[begin : begin + len(memory)].numpy()[:] = memory
        crossed = self._gpu.on.crossed
        crossed.copies += 1
        crossed.copied += nbytes
        self._marks[slot] = self._lane.send(self._targets[slot][:nbytes], staged, self._used[slot])

    def _records(self, layer: int, slot: int) -> LayerWeights:
        at, _ = self._places[layer]

        def place(tensor: ModelTensor) -> object:
            begin = at[tensor.name]
            return self._gpu.typed(self._targets[slot][begin : begin + tensor.nbytes], tensor.spec.scheme)

        with self._lease(layer) as raw:
            return self._make(layer, raw, self._gpu, place)

    def _settle(self) -> None:
        """Wait for a copy that was never used."""
        if self._next is not None:
            self._next[1].result()
            self._next = None

    def close(self) -> None:
        self._settle()
        for mark in self._marks:
            if mark is not None:
                self._lane.landed(mark)  # memory that a copy still writes must not be freed
        self._thread.shutdown()
        self._made.clear()
