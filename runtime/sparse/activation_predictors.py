"""Activation predictors: which neurons a layer will activate, predicted before its attention from the previous layer's output.

A prediction only moves reads: the neurons it names start loading while attention is computed; the gates still decide what is used, and
missed neurons are read then. So outputs are unchanged; a wrong prediction costs bytes.

A predictor is linear and low-rank, x -> (x / rms(x)) A B > threshold, fitted in closed form: ridge regression on a text's activity, reduced
to the directions that explain most of it (reduced-rank regression, Izenman 1975). LLM in a flash (2312.11514) trains predictors of the same
shape by gradient descent on attention's output. One threshold per layer yields the recall asked for; precision and recall on a held-out
part of the text are measured and stored.
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
RIDGE = 1e-2  # relative to the mean square that it is added to
HELD_OUT_FRACTION = 4  # one part in this many is held out
FEW = 8  # tokens of a pass: more activate too many neurons for a prediction to help


@dataclass(frozen=True)
class Predictor:
    """The predictor of one layer."""

    into: np.ndarray  # float32 [D, rank]
    out: np.ndarray  # float32 [rank, F]
    thresholds: np.ndarray  # float32 [F]

    def active(self, x: np.ndarray) -> np.ndarray:
        """Indices of the neurons likely to be activated by any of the residual streams x [T, D], likeliest first."""
        above = (scaled(x) @ self.into @ self.out - self.thresholds).max(0)
        neurons = np.flatnonzero(above > 0)
        return neurons[np.argsort(-above[neurons], kind="stable")]


@dataclass(frozen=True)
class Predictors:
    """One predictor per layer."""

    layers: tuple[Predictor, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in (layer.into, layer.out, layer.thresholds))

    def save(self, folder: Path) -> Path:
        """Write them beside a model's weights. Raises EffllmError."""
        target = folder / FILE
        try:
            with atomic_file(target) as out:
                np.savez(out, **{name: np.stack([getattr(layer, name) for layer in self.layers]) for name in ("into", "out", "thresholds")})
        except OSError as error:
            raise not_written(error, f"{target} cannot be written", "copy the model to a folder that you can write to") from error
        return target


def load(folder: Path, layers: int, width: int, neurons: int) -> Predictors | None:
    """The predictors of a folder's model; None without any, or if they do not fit it."""
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
    valid = fits and all(np.isfinite(array).all() for array in (into, out)) and not np.isnan(thresholds).any()
    return Predictors(tuple(map(Predictor, into, out, thresholds))) if valid else None


def _is_plain(path: Path) -> bool:
    """Whether a file is an uncompressed archive of arrays, as `save` writes it: compressed data may expand to any size."""
    if not path.is_file():  # opening a pipe would block
        return False
    with zipfile.ZipFile(path) as archive:
        return all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())


def scaled(x: np.ndarray) -> np.ndarray:
    """x [T, D] with rows divided by their root mean square, as the norm before the matrices scales it."""
    return x / np.sqrt(np.square(x, dtype=np.float32).mean(-1, keepdims=True) + np.float32(1e-6))


def train(trace: Trace, inputs: Sequence[np.ndarray], rank: int = RANK,
          recall: float = RECALL) -> Iterator[Progress | tuple[Predictors, PredictorRates]]:
    """Fit every layer's predictor on `inputs` [T, D] per layer and the trace; yields Progress and, last, the predictors with their quality
    on the end of the text."""
    fitted, recalls, named = [], [], []
    cut = trace.tokens - trace.tokens // HELD_OUT_FRACTION
    for layer, x in enumerate(inputs):
        active = np.unpackbits(trace.layers[layer], axis=1, count=trace.neurons).astype(bool)
        x = scaled(np.asarray(x, np.float32))
        predictor = _fit(x[:cut], active[:cut], rank, recall)
        predicted = x[cut:] @ predictor.into @ predictor.out > predictor.thresholds
        fitted.append(predictor)
        recalls.append(float((predicted & active[cut:]).sum() / max(1, active[cut:].sum())))
        named.append(float(predicted.mean()))
        yield Progress("training predictors", layer + 1, len(inputs), "layers")
    yield Predictors(tuple(fitted)), PredictorRates(fitted[0].into.shape[1], tuple(recalls), tuple(named))


def _fit(x: np.ndarray, active: np.ndarray, rank: int, recall: float) -> Predictor:
    mean = active.mean(0, dtype=np.float32)
    products = x.T.astype(np.float64) @ x
    products[np.diag_indices_from(products)] += RIDGE * np.trace(products) / len(products)
    root = np.linalg.cholesky(products)
    # With products = root root', the fit is W = products^-1 x'y and the variance explained is (root' W)(root' W)'.
    explained = np.linalg.solve(root, x.T.astype(np.float64) @ (active - mean))
    _, directions = np.linalg.eigh(explained @ explained.T)
    directions = directions[:, ::-1][:, : min(rank, len(directions))]
    into = np.linalg.solve(root.T, directions).astype(np.float32)
    out = (directions.T @ explained).astype(np.float32)
    likely = (x @ into @ out + mean)[active]
    threshold = np.quantile(likely, 1 - recall) if len(likely) else np.inf
    return Predictor(into, out, (threshold - mean).astype(np.float32))
