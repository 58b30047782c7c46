"""Chooses whether a device runs a stage as one Triton kernel of ours or as several torch ops.

Triton compiles for the GPU at hand. The first time a kind of call occurs, both versions run over the same memory and their results are
compared. The choice is not made by timing: two runs could then choose differently, and their results differ by rounding. Failures are
reported once, and after a failed compilation no kernel is compiled any more.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import torch

from .device import Device

Run = Callable[[], torch.Tensor]
TOLERANCE = 1e-5  # relative to the largest result: float32 sums in two orders
FEW_TOKENS = 8  # up to which our kernels are used, except those that dequantize weights
DIFFERENT_RESULTS = "the results of the single kernel differ"


class KernelChoice:
    """Choices for one device. `declined`: per kind, why our kernel is not used; "" if it is. `broken`: why nothing is compiled any more."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.declined: dict[tuple[object, ...], str] = {}
        self.broken = ""
        self._announced: set[str] = set()
        self._pending: list[str] = []

    @property
    def compiles(self) -> bool:
        return self._device.compiles

    def chosen(self, kind: tuple[object, ...], description: str, by_triton: Run, by_torch: Run,
               try_both: Callable[[], tuple[torch.Tensor, torch.Tensor]],
               tolerance: float = TOLERANCE) -> torch.Tensor:
        """`by_triton` or `by_torch`. The first call of a kind (all calls that compile alike) is `try_both`: it returns both results, with
        no lasting side effects, which must differ by at most `tolerance` of the largest finite number. `description`: the stage's name in
        notices to users."""
        if not self.compiles or self.broken or self.declined.get(kind):
            return by_torch()
        try:
            if kind not in self.declined:
                result, expected = try_both()
                difference = torch.where(result == expected, 0.0, result - expected).abs().max()  # equal infinities
                is_close = bool((difference <= tolerance * torch.where(expected.isfinite(), expected, 0.0).abs().max()).item())
                self.declined[kind] = "" if is_close else DIFFERENT_RESULTS
                if not is_close:
                    self._announce(f"the GPU {description} with several kernels each: {DIFFERENT_RESULTS}")
                    return by_torch()
            return by_triton()
        except torch.OutOfMemoryError:  # not caused by the kernel; torch ops may need less memory or fail as well
            return by_torch()
        except Exception as error:  # any error of a compiler or of its absence: torch ops remain
            self.broken = _reason(error)
            self._announce(f"the GPU runs the stages of a layer with several kernels each: {self.broken}")
            return by_torch()

    def announcements(self) -> list[str]:
        """Failures since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def _announce(self, line: str) -> None:
        if line not in self._announced:
            self._announced.add(line)
            self._pending.append(line)


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Triton is not installed (pip install 'effllm[cuda]')"
    if isinstance(error, subprocess.CalledProcessError | OSError):
        return "Triton cannot compile here: it needs a C compiler, Python's headers and a cache folder"
    return (str(error) or type(error).__name__).splitlines()[0]
