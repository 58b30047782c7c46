"""The torch backend's device: memory, pinned buffers and a copy stream. Everything that needs a real GPU is here and nowhere else.

`SimulatedDevice` does the same on CPU tensors: it enforces a memory limit, counts transfers, shares no memory with host arrays, and
performs copies on its side stream as late as their order allows, so that a missing copy or wait shows up as wrong numbers.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from ... import DoesNotFit
from ..layout import align

LINK_NBYTES = 32 << 20  # copied to measure the transfer rate
BLOCK = 512  # allocation granularity
HINT = "use a smaller --vram, or fewer layers with -ngl"


@contextmanager
def within_memory(message: str) -> Iterator[None]:
    """Context manager: raises DoesNotFit with `message` if torch, the driver or one of their libraries runs out of memory inside."""
    try:
        yield
    except RuntimeError as error:
        message_of_error = str(error)
        if not isinstance(error,
                          torch.OutOfMemoryError) and "out of memory" not in message_of_error and "ALLOC_FAILED" not in message_of_error:
            raise
        raise DoesNotFit(message, HINT) from error


@dataclass
class TransferCounts:
    """Transfers between host and device, in bytes and calls: weights and pages, activations each way, and layers copied for a pass."""

    placed: int = 0
    sent: int = 0
    received: int = 0
    copied: int = 0
    sends: int = 0
    receives: int = 0
    copies: int = 0


class CopyStream(Protocol):
    """Copies from pinned memory that overlap with computation. Marks are points in the order of either stream."""

    def send(self, target: torch.Tensor, staged: torch.Tensor, after: object) -> object:
        """Begin a copy once the computation has passed the mark `after`; returns the mark of its end."""
    def arrive(self, mark: object) -> None:
        """Make subsequent computation wait for the copy."""
    def landed(self, mark: object) -> None:
        """Block until the copy has read its host memory."""
    def used(self) -> object:
        """A mark after everything computed so far."""


class Device(Protocol):
    """A device as the backend uses it.

    `free`: bytes of unused memory. `take` allocates zeroed memory and raises DoesNotFit if there is none. `pinned` allocates page-locked
    host memory. `to_device` and `to_host` copy an array there and a tensor back, synchronously. `lane` creates a copy stream. `recorded`
    captures `run` as a graph and returns a replay function and the result, which is valid after a replay; it raises RuntimeError if `run`
    synchronizes with the device. `release` frees the memory of the last recording. `link_rate` measures the transfer rate in bytes per
    second and raises DoesNotFit without memory for it.
    """

    name: str
    torch: torch.device
    compiles: bool  # Triton kernels can be compiled
    kind: str  # GPU and library versions, on which the bits of results depend
    host_nbytes: int  # host memory that the driver takes later
    crossed: TransferCounts

    def free(self) -> int: ...
    def take(self, nbytes: int) -> torch.Tensor: ...
    def pinned(self, nbytes: int) -> torch.Tensor: ...
    def to_device(self, array: np.ndarray) -> torch.Tensor: ...
    def to_host(self, tensor: torch.Tensor) -> np.ndarray: ...
    def lane(self) -> CopyStream: ...
    def recorded(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]: ...
    def release(self) -> None: ...
    def link_rate(self) -> float: ...


class CudaDevice:
    """The first NVIDIA GPU that torch finds."""

    compiles = True
    # Kernels are loaded on first use: 430 MiB were measured on an H100 with torch 2.11; Triton takes 130 MiB when it first compiles.
    host_nbytes = 576 << 20

    def __init__(self, name: str = "cuda") -> None:
        self.name, self.torch, self.crossed = name, torch.device(name), TransferCounts()
        # A single stream, since libraries reserve memory for every stream; and the last graph, whose memory pool the next one reuses.
        self._recorder: torch.cuda.Stream | None = None
        self._last: torch.cuda.CUDAGraph | None = None

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.torch)[0]

    def take(self, nbytes: int) -> torch.Tensor:
        with within_memory(f"the GPU has less than {nbytes} bytes left: another program has taken some since the plan was made"):
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.torch)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.cpu().numpy()

    def lane(self) -> CopyStream:
        return CudaCopyStream(self.torch)

    def recorded(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        side_stream = self._recorder = self._recorder or torch.cuda.Stream(self.torch)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.torch)
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):  # not torch.cuda.graph, which runs a garbage collection every time
            graph.capture_begin(pool=None if self._last is None else self._last.pool(), capture_error_mode="thread_local")
            try:
                out = run()
            except BaseException:
                with suppress(RuntimeError):  # capture_end fails without a graph
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(side_stream)
        self._last = graph
        return graph.replay, out

    def release(self) -> None:
        self._last = None

    @cached_property
    def kind(self) -> str:
        try:  # builds of torch may bring Triton under another name
            triton = version("triton")
        except PackageNotFoundError:
            triton = str(find_spec("triton") is not None)
        return f"{torch.cuda.get_device_name(self.torch)} {torch.__version__} {triton}"

    def link_rate(self) -> float:
        with within_memory("not enough memory to measure the transfer rate to the GPU"):
            host, there = self.pinned(LINK_NBYTES), self.take(LINK_NBYTES)
        rates = []
        for _ in range(4):
            torch.cuda.synchronize(self.torch)
            started = time.perf_counter()
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize(self.torch)
            rates.append(LINK_NBYTES / (time.perf_counter() - started))
        del there
        torch.cuda.empty_cache()  # a plan counts free memory
        return max(rates)


class CudaCopyStream:
    """A CUDA side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def send(self, target: torch.Tensor, staged: torch.Tensor, after: object) -> object:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(staged, non_blocking=True)
            mark = torch.cuda.Event()
            mark.record(self._stream)
        return mark

    def arrive(self, mark: object) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def landed(self, mark: object) -> None:
        mark.synchronize()

    def used(self) -> object:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark


class SimulatedDevice:
    """CPU tensors that behave like a GPU with `memory` bytes (None: unlimited), of which `allocated` are in use; `link`: bytes per second.
    `compiles`: Triton kernels run in its interpreter."""

    host_nbytes = 0
    kind = "simulated"

    def __init__(self, memory: int | None = None, link: float = 12e9, name: str = "cuda", compiles: bool = False) -> None:
        self.compiles = compiles
        self.name, self.torch, self.crossed = name, torch.device("cpu"), TransferCounts()
        self.memory, self.allocated, self.peak, self.link = memory, 0, 0, link

    def free(self) -> int:
        return 1 << 62 if self.memory is None else self.memory - self.allocated

    def take(self, nbytes: int) -> torch.Tensor:
        rounded = align(nbytes, BLOCK)
        if rounded > self.free():
            raise DoesNotFit(f"the GPU has less than {nbytes} bytes left: another program has taken some since the plan was made", HINT)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.allocated += rounded
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(memory.untyped_storage(), self._release, rounded)
        return memory

    def _release(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy().copy()

    def lane(self) -> CopyStream:
        return SimulatedCopyStream()

    def recorded(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        out = run()
        return lambda: out.copy_(run()), out

    def release(self) -> None:
        """No-op: a recording holds nothing of its own."""

    def link_rate(self) -> float:
        self.take(LINK_NBYTES)
        return self.link


class SimulatedCopyStream:
    """Copies are deferred until something waits for them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._number = self._done = 0

    def send(self, target: torch.Tensor, staged: torch.Tensor, after: object) -> object:
        self._number += 1
        self._pending.append((self._number, target, staged))
        return self._number

    def arrive(self, mark: object) -> None:
        while self._pending and self._pending[0][0] <= mark:
            _, target, staged = self._pending.popleft()
            target.copy_(staged)

    def landed(self, mark: object) -> None:
        self.arrive(mark)

    def used(self) -> object:
        return self._number


def find_gpu() -> Device | None:
    """The GPU that torch can use here, if any. This loads the libraries for matrix products: some hundred MiB of host memory, which a
    memory plan made afterwards counts as part of the program. Raises DoesNotFit if the GPU has no room even for these, RuntimeError with
    torch's message if there is a GPU that torch cannot use."""
    if not torch.cuda.is_available():
        return None
    device = CudaDevice()
    with within_memory("other programs are using the GPU's memory"):
        ones = torch.ones(8, 8, device=device.torch)
        (ones @ ones).sum().item()
    return device
