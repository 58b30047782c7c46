"""CUDA graphs: passes of few tokens through a device's layers are recorded and replayed.

Such a pass is some hundred small kernels per layer, and launching them from Python takes ten times as long as running them. As on the CPU
(`kernels/cpu/jobs.py`), a pass differs from the previous one with as many tokens only in the contents of its arrays, as long as the list of
blocks is the same: the second such pass is recorded over device arrays of its own, and later ones copy their inputs there and replay the
recording. Inputs from the host are identified by the array they came from, which the cache changes in place, or by the function that
derives them from positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from .device import Device


class UnknownInput(Exception):
    """A pass uses an input that the previous pass with as many tokens did not."""


Derive = Callable[[np.ndarray], np.ndarray]  # from positions int64 [T] to an input array


@dataclass
class RecordedGraph:
    """A pass of some number of tokens over `blocks`. `x`, `out` and `replay` are set when the pass runs for the second time."""

    blocks: np.ndarray
    key: object  # the `GraphCache.key` it was run with
    arrays: dict[int, tuple[np.ndarray, torch.Tensor]] = field(default_factory=dict)  # host arrays by id(), with their device copies
    derived: dict[object, tuple[Derive, torch.Tensor]] = field(default_factory=dict)  # inputs computed from positions
    x: torch.Tensor | None = None  # the input
    out: torch.Tensor | None = None  # the output
    replay: Callable[[], None] | None = None


class GraphCache:
    """The recorded passes of one device. `broken`: why a pass could not be recorded, after which none is; `key`: distinguishes passes over
    the same blocks that run different kernels."""

    def __init__(self, device: Device) -> None:
        self._device, self.key = device, None
        self._graphs: dict[int, RecordedGraph] = {}  # by number of tokens
        self._current: RecordedGraph | None = None
        self.broken, self._announced = "", False

    def run(self, blocks: np.ndarray, positions: np.ndarray, x: np.ndarray, layers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run `layers` over the stream x float32 [T, D] on the device; it must do the same for every pass of T tokens over this
        `blocks`."""
        graph = self._graphs.get(len(x))
        if graph is None or graph.blocks is not blocks or graph.key != self.key or self.broken:
            self._graphs.pop(len(x), None)
            graph = RecordedGraph(blocks, self.key)
            with self._using(None if self.broken else graph):
                out = layers(self._device.to_device(x))
            self._graphs[len(x)] = graph  # only if the pass succeeded
            return out
        if graph.x is None:
            graph.x = self._device.to_device(x)
        for array, device_array in graph.arrays.values():
            _put(array, device_array)
        for derive, device_array in graph.derived.values():
            _put(derive(positions), device_array)
        if graph.replay is None:
            with self._using(graph):
                try:
                    self._graphs = {len(x): graph}  # memory is planned for one recording
                    graph.replay, graph.out = self._device.recorded(lambda: layers(graph.x))
                except UnknownInput:
                    del self._graphs[len(x)]
                except RuntimeError as error:  # an operation of this pass cannot be captured
                    self.broken = str(error).splitlines()[0]
            if graph.replay is None:
                return layers(self._device.to_device(x))
        _put(x, graph.x)
        with self._using(graph):
            graph.replay()
        return graph.out

    def array(self, array: np.ndarray) -> torch.Tensor | None:
        """The device copy of an array that is changed in place, inside `run`; None outside."""
        if self._current is None:
            return None
        if id(array) not in self._current.arrays:
            if self._current.x is not None:
                raise UnknownInput
            self._current.arrays[id(array)] = array, self._device.to_device(array)
        return self._current.arrays[id(array)][1]

    def of_positions(self, key: object, positions: np.ndarray, derive: Derive) -> torch.Tensor | None:
        """The device copy of `derive(positions)`, inside `run`; None outside."""
        if self._current is None:
            return None
        if key not in self._current.derived:
            if self._current.x is not None:
                raise UnknownInput
            self._current.derived[key] = derive, self._device.to_device(derive(positions))
        return self._current.derived[key][1]

    def announcements(self) -> list[str]:
        """A notice, once, if passes could not be recorded."""
        if not self.broken or self._announced:
            return []
        self._announced = True
        return [f"GPU kernels are launched one by one instead of as a graph, which takes several times as long: {self.broken}"]

    def forget(self) -> None:
        """Drop all recordings."""
        self._graphs.clear()

    @contextmanager
    def _using(self, recording: RecordedGraph | None) -> Iterator[None]:
        self._current = recording
        try:
            yield
        finally:
            self._current = None


def _put(array: np.ndarray, device_array: torch.Tensor) -> None:
    device_array.copy_(torch.from_numpy(np.ascontiguousarray(array)).view(device_array.shape))
