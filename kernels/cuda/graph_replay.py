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


Make = Callable[[np.ndarray], np.ndarray]  # of positions int64 [T], what lies on the device


@dataclass
class RecordedGraph:
    """A pass of some number of tokens over `blocks`, with this `key`: its host inputs (arrays, and what is derived from positions), its
    input `x` and, from the second time on, its replay function and output."""

    blocks: np.ndarray
    key: object
    arrays: dict[int, tuple[np.ndarray, torch.Tensor]] = field(default_factory=dict)
    made: dict[object, tuple[Make, torch.Tensor]] = field(default_factory=dict)
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None
    replay: Callable[[], None] | None = None


class GraphCache:
    """The recorded passes of one device. `broken`: why a pass could not be recorded, after which none is; `key`: the mode of coming passes,
    where passes over the same blocks may differ."""

    def __init__(self, device: Device) -> None:
        self._device, self.key = device, None
        self._known: dict[int, RecordedGraph] = {}  # by tokens
        self._now: RecordedGraph | None = None
        self.broken, self._said = "", False

    def run(self, blocks: np.ndarray, positions: np.ndarray, x: np.ndarray, layers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run `layers` over the stream x float32 [T, D] on the device; it must do the same for every T tokens over these very `blocks`."""
        known = self._known.get(len(x))
        if known is None or known.blocks is not blocks or known.key != self.key or self.broken:
            self._known.pop(len(x), None)
            known = RecordedGraph(blocks, self.key)
            with self._noting(None if self.broken else known):
                out = layers(self._device.to_device(x))
            self._known[len(x)] = known  # of a pass that breaks off nothing is known
            return out
        if known.x is None:
            known.x = self._device.to_device(x)
        for array, own in known.arrays.values():
            _put(array, own)
        for make, own in known.made.values():
            _put(make(positions), own)
        if known.replay is None:
            with self._noting(known):
                try:
                    self._known = {len(x): known}  # the memory of one recording is planned
                    known.replay, known.out = self._device.recorded(lambda: layers(known.x))
                except UnknownInput:
                    del self._known[len(x)]
                except RuntimeError as error:  # what this pass does cannot be in a graph
                    self.broken = str(error).splitlines()[0]
            if known.replay is None:
                return layers(self._device.to_device(x))
        _put(x, known.x)
        with self._noting(known):
            known.replay()
        return known.out

    def array(self, array: np.ndarray) -> torch.Tensor | None:
        """The device copy of an array that is changed in place, inside `run`; None outside."""
        if self._now is None:
            return None
        if id(array) not in self._now.arrays:
            if self._now.x is not None:
                raise UnknownInput
            self._now.arrays[id(array)] = array, self._device.to_device(array)
        return self._now.arrays[id(array)][1]

    def of_positions(self, key: object, positions: np.ndarray, make: Make) -> torch.Tensor | None:
        """The device copy of `make(positions)`, inside `run`; None outside."""
        if self._now is None:
            return None
        if key not in self._now.made:
            if self._now.x is not None:
                raise UnknownInput
            self._now.made[key] = make, self._device.to_device(make(positions))
        return self._now.made[key][1]

    def announcements(self) -> list[str]:
        """That passes could not be recorded, once."""
        if not self.broken or self._said:
            return []
        self._said = True
        return [f"GPU kernels are launched one by one instead of as a graph, which takes several times as long: {self.broken}"]

    def forget(self) -> None:
        """Drop all recordings."""
        self._known.clear()

    @contextmanager
    def _noting(self, recording: RecordedGraph | None) -> Iterator[None]:
        self._now = recording
        try:
            yield
        finally:
            self._now = None


def _put(array: np.ndarray, own: torch.Tensor) -> None:
    own.copy_(torch.from_numpy(np.ascontiguousarray(array)).view(own.shape))
