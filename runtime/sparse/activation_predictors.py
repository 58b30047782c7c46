"""Which neurons a layer is about to activate, guessed before its attention from what comes out of the layer before it.

A guess only moves reads: neurons that it names begin to come from the disk while attention is computed, the gates still decide what is
used, and what a guess missed is read then. So answers keep their bits; a wrong guess costs bytes.

A predictor is linear and of low rank, x -> (x / rms(x)) A B > threshold, fitted in closed form: the least-squares fit of a text's activity
with a ridge, cut to the directions that explain most of it (reduced-rank regression, Izenman 1975); LLM in a flash (2312.11514) trains
ones of the same shape by gradient descent on what attention adds. One threshold a layer lets through the share of active neurons that was
asked for; what it lets through of a part of the text that was kept back is measured and kept beside it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING

import numpy as np

from ... import not_written
from ..events import Progress
from ..files.atomic_write import atomic_file
from ..files.model_folder_files import PREDICTORS
from .sparsity_file import PredictorRates

if TYPE_CHECKING:
    from .sparsity import Trace

FILE = PREDICTORS
RANK, RECALL = 64, 0.95
RIDGE = 1e-2  # of the mean of the squares that it is added to
KEPT_BACK = 4  # one part in so many of the text judges
FEW = 8  # tokens at a time: more use too many neurons for a guess to be of use


@dataclass(frozen=True)
class Predictor:
    """One layer's: float32 [D, rank], [rank, F], and thresholds [F]."""

    into: np.ndarray
    out: np.ndarray
    thresholds: np.ndarray

    def active(self, x: np.ndarray) -> np.ndarray:
        """Indices of the neurons that any of the residual streams x [T, D] is likely to activate, the likeliest first."""
        above = (scaled(x) @ self.into @ self.out - self.thresholds).max(0)
        found = np.flatnonzero(above > 0)
        return found[np.argsort(-above[found], kind="stable")]


@dataclass(frozen=True)
class Predictors:
    """One a layer."""

    layers: tuple[Predictor, ...]

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for each in self.layers for own in (each.into, each.out, each.thresholds))

    def save(self, folder: Path) -> Path:
        """Write them beside a model's weights. Raises EffllmError where that is not possible."""
        target = folder / FILE
        try:
            with atomic_file(target) as out:
                np.savez(out, **{name: np.stack([getattr(each, name) for each in self.layers]) for name in ("into", "out", "thresholds")})
        except OSError as error:
            raise not_written(error, f"{target} cannot be written", "a copy of the model in a folder of your own") from error
        return target


def load(folder: Path, layers: int, width: int, neurons: int) -> Predictors | None:
    """Those of a folder's model; None where there are none, or what lies there does not fit it."""
    try:
        if not _is_plain(folder / FILE):
            return None
        with np.load(folder / FILE, allow_pickle=False) as stored:
            into, out, thresholds = (np.ascontiguousarray(stored[name], np.float32) for name in ("into", "out", "thresholds"))
    except (OSError, ArithmeticError, ValueError, LookupError, EOFError, MemoryError, TypeError, RuntimeError, SyntaxError, TokenError,
            zipfile.BadZipFile):
        return None
    rank = into.shape[-1] if into.ndim else 0
    fits = (into.shape, out.shape, thresholds.shape) == ((layers, width, rank), (layers, rank, neurons), (layers, neurons))
    atomic_file = fits and all(np.isfinite(own).all() for own in (into, out)) and not np.isnan(thresholds).any()
    return Predictors(tuple(map(Predictor, into, out, thresholds))) if atomic_file else None


def _is_plain(path: Path) -> bool:
    """Whether a file is an archive of arrays as they lie in memory, as `save` writes it: what is packed may unfold to any size."""
    if not path.is_file():  # a pipe would be waited for
        return False
    with zipfile.ZipFile(path) as archive:
        return all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())


def scaled(x: np.ndarray) -> np.ndarray:
    """x [T, D] by rows over their root mean square, as the norm before the matrices scales it."""
    return x / np.sqrt(np.square(x, dtype=np.float32).mean(-1, keepdims=True) + np.float32(1e-6))


def train(trace: Trace, inputs: Sequence[np.ndarray], rank: int = RANK,
          recall: float = RECALL) -> Iterator[Progress | tuple[Predictors, PredictorRates]]:
    """Fit every layer's on `inputs` [T, D] a layer and the trace; yields them last, with their worth on the end of the text."""
    fitted, found, named = [], [], []
    cut = trace.tokens - trace.tokens // KEPT_BACK
    for layer, x in enumerate(inputs):
        active = np.unpackbits(trace.layers[layer], axis=1, count=trace.neurons).astype(bool)
        x = scaled(np.asarray(x, np.float32))
        each = _fit(x[:cut], active[:cut], rank, recall)
        guessed = x[cut:] @ each.into @ each.out > each.thresholds
        fitted.append(each)
        found.append(float((guessed & active[cut:]).sum() / max(1, active[cut:].sum())))
        named.append(float(guessed.mean()))
        yield Progress("training predictors", layer + 1, len(inputs), "layers")
    yield Predictors(tuple(fitted)), PredictorRates(fitted[0].into.shape[1], tuple(found), tuple(named))


def _fit(x: np.ndarray, active: np.ndarray, rank: int, recall: float) -> Predictor:
    mean = active.mean(0, dtype=np.float32)
    products = x.T.astype(np.float64) @ x
    products[np.diag_indices_from(products)] += RIDGE * np.trace(products) / len(products)
    root = np.linalg.cholesky(products)
    # With products = root root', the fit is W = products^-1 x'y and what it explains is (root' W)(root' W)'.
    explained = np.linalg.solve(root, x.T.astype(np.float64) @ (active - mean))
    _, directions = np.linalg.eigh(explained @ explained.T)
    directions = directions[:, ::-1][:, : min(rank, len(directions))]
    into = np.linalg.solve(root.T, directions).astype(np.float32)
    out = (directions.T @ explained).astype(np.float32)
    likely = (x @ into @ out + mean)[active]
    least = np.quantile(likely, 1 - recall) if len(likely) else np.inf
    return Predictor(into, out, (least - mean).astype(np.float32))
