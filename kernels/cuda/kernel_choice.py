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
CLOSE = 1e-5  # of the largest result: two orders of the same float32 sums
FEW = 8  # tokens that kernels of ours are for, but for opening a weight
OTHERS = "the results of the single kernel differ"


class KernelChoice:
    """Choices for one device. `declined`: per kind, why our kernel is not used; "" if it is. `broken`: why nothing is compiled any more."""

    def __init__(self, on: Device) -> None:
        self._on = on
        self.declined: dict[tuple[object, ...], str] = {}
        self.broken = ""
        self._said: set[str] = set()
        self._pending: list[str] = []

    @property
    def compiles(self) -> bool:
        return self._on.compiles

    def chosen(self, kind: tuple[object, ...], what: str, ours: Run, torchs: Run, tried: Callable[[], tuple[torch.Tensor, torch.Tensor]],
               close: float = CLOSE) -> torch.Tensor:
        """`ours` or `torchs`. The first call of a kind (all calls that compile alike) is `tried`: it returns both results, with no lasting
        side effects, which must differ by at most `close` of the largest finite number. `what`: a description for users of what the GPU
        otherwise does in several kernels."""
        if not self.compiles or self.broken or self.declined.get(kind):
            return torchs()
        try:
            if kind not in self.declined:
                found, wanted = tried()
                apart = torch.where(found == wanted, 0.0, found - wanted).abs().max()  # infinities may be equal
                is_close = bool((apart <= close * torch.where(wanted.isfinite(), wanted, 0.0).abs().max()).item())
                self.declined[kind] = "" if is_close else OTHERS
                if not is_close:
                    self._say(f"the GPU {what} with several kernels each: {OTHERS}")
                    return torchs()
            return ours()
        except torch.OutOfMemoryError:  # says nothing of kernels; torch's way may need less, or says so
            return torchs()
        except Exception as error:  # whatever a compiler or its absence raises, for this shape or any, there is another way
            self.broken = _reason(error)
            self._say(f"the GPU runs the stages of a layer with several kernels each: {self.broken}")
            return torchs()

    def announcements(self) -> list[str]:
        """Failures since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._pending.append(line)


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Triton is not installed (pip install 'effllm[cuda]')"
    if isinstance(error, subprocess.CalledProcessError | OSError):
        return "Triton cannot compile here: it needs a C compiler, Python's headers and a cache folder"
    return (str(error) or type(error).__name__).splitlines()[0]
