"""Measuring activation sparsity: which neurons a text activates, and what a window over them would read.

A trace is recorded once, through the kernels of a run. Replaying it through the window of `offload/neuron_pager.py` tells how many units a
token misses for any number of slots; `sparsity.json` beside the weights keeps that for the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np

from ... import UsageError, not_written
from ...offload.neuron_pager import Window
from ...offload.safetensors_header import is_gguf
from ..config import ModelConfig, read_config
from ..engine import Engine
from ..events import Progress
from ..files.atomic_write import atomic_file
from ..files.model_folder_files import require_folder
from ..stores.container import Container, read_container
from .activation_predictors import scaled
from .neuron_bundles import SPARSE, is_lossy
from .sparsity_file import Sparsity, require_writable

TOKENS, LEAST = 2048, 256
SHARES = (0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75)
OTHER_TRACE = "choose another path with --trace"
WARM = 64  # tokens that fill a window before misses are counted


@dataclass(frozen=True)
class Trace:
    """Per layer, the neurons that each token activates: bits uint8 [tokens, neurons / 8], as packed by `numpy.packbits`."""

    neurons: int
    layers: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        return len(self.layers[0])

    def active(self, layer: int, token: int) -> np.ndarray:
        """Indices of a token's active neurons, ascending."""
        return np.flatnonzero(np.unpackbits(self.layers[layer][token], count=self.neurons))

    def shares(self) -> tuple[float, ...]:
        """Each layer's share of active neurons."""
        return tuple(float(np.bitwise_count(bits).sum()) / (self.tokens * self.neurons) for bits in self.layers)

    def save(self, path: Path) -> None:
        """Write an .npz file. Raises EffllmError."""
        try:
            # /dev/null is not replaced
            with path.open("wb") if path.is_symlink() or (path.exists() and not path.is_file()) else atomic_file(path) as out:
                np.savez_compressed(out, neurons=np.int64(self.neurons), active=np.stack(self.layers))
        except OSError as error:
            hint = "another --trace FILE"
            raise not_written(error, f"{path} cannot be written", hint, f"make room there, or {hint}") from error

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path, allow_pickle=False) as stored:
            return cls(int(stored["neurons"]), tuple(stored["active"]))


def require_sparse_folder(folder: Path) -> None:
    """Checked before the model is loaded: raises UsageError for a model without sparsity, EffllmError if results cannot be written."""
    require_sparse(read_config(folder), None if is_gguf(folder) else read_container(folder))
    require_writable(folder)


def require_trace_path(path: Path) -> None:
    """Checked before minutes of work: raises UsageError if the trace would overwrite anything but an older trace. Pipes and devices are
    allowed."""
    require_folder(path.parent, OTHER_TRACE)
    if path.is_dir() or (path.is_file() and not is_trace(path)):
        what = "a folder" if path.is_dir() else "not a neuron trace"
        raise UsageError(f"--trace {path} is {what}, it stays as it is", OTHER_TRACE)


def is_trace(path: Path) -> bool:
    """Whether a file is one that `Trace.save` wrote."""
    try:
        with ZipFile(path) as stored:
            return set(stored.namelist()) == {"neurons.npy", "active.npy"}
    except (OSError, BadZipFile, ValueError):
        return False


def require_sparse(config: ModelConfig, container: Container | None) -> None:
    """Raises UsageError for a model without sparsity."""
    if config.moe is not None:
        raise UsageError("a mixture of experts skips whole experts, not neurons",
                         f"give a dense model with {' or '.join(SPARSE)} (hidden_act in its config.json)")
    if config.hidden_act not in SPARSE and not is_lossy(container):
        raise UsageError(f"{config.hidden_act} is never exactly zero: no neuron can be skipped",
                         f"give a model with {' or '.join(SPARSE)} (hidden_act in its config.json)")


def record(engine: Engine, ids: Sequence[int], inputs: list[np.ndarray] | None = None) -> Iterator[Progress | Trace]:
    """Run a text and record the inputs of `down`; yields the trace last. `inputs` receives every layer's residual stream, float16 [tokens,
    D], as read by its attention. Raises UsageError for a model without sparsity."""
    config = engine.config
    require_sparse(config, engine.prepared.container)
    if len(ids) < LEAST:
        raise UsageError(f"the text has {len(ids)} tokens, at least {LEAST} are needed, {TOKENS} are enough", "a longer --text FILE")
    bits: list[list[np.ndarray]] = [[] for _ in range(config.num_hidden_layers)]
    streams: list[list[np.ndarray]] = [[] for _ in range(config.num_hidden_layers)]

    def tap(name: str, layer: int, value: np.ndarray) -> None:
        if name == "mlp_hidden":
            bits[layer].append(np.packbits(np.asarray(value) != 0, axis=1))
        if name == "block_in" and inputs is not None:
            streams[layer].append(scaled(np.asarray(value)).astype(np.float16))

    engine.reset()
    step = min(engine.prepared.chunk, engine.n_ctx)
    length = engine.n_ctx // step * step
    for begin in range(0, len(ids), length):
        engine.reset()
        window = ids[begin : begin + length]
        for at in range(0, len(window), step):
            engine.model.forward(np.array(window[at : at + step], np.int64), engine.cache, tap)
            yield Progress("recording", min(begin + at + step, len(ids)), len(ids), "tokens")
    engine.reset()
    if inputs is not None:
        inputs += [np.concatenate(layer) for layer in streams]
    yield Trace(config.intermediate_size, tuple(np.concatenate(layer) for layer in bits))


def missed_units(trace: Trace, layer: int, slots: int, together: int = 1) -> np.ndarray:
    """How many units each token misses with a window of `slots`, int64 [tokens]."""
    window, missed = Window.empty(-(-trace.neurons // together), slots), np.zeros(trace.tokens, np.int64)
    for token in range(trace.tokens):
        needed = np.unique(trace.active(layer, token) // together)
        for begin in range(0, len(needed), slots):
            missed[token] += len(window.use(needed[begin : begin + slots]))
    return missed


def summarize(trace: Trace, together: int = 1, shares: Sequence[float] = SHARES) -> Sparsity:
    """The sparsity that a trace shows."""
    units = -(-trace.neurons // together)
    settled = slice(min(WARM, trace.tokens // 2), None)
    missed = {share: tuple(float(missed_units(trace, layer, max(2, round(share * units)), together)[settled].mean()) / units
                           for layer in range(len(trace.layers))) for share in shares}
    return Sparsity(trace.tokens, trace.shares(), missed)
