"""`sparsity.json` beside a model's weights: the results of `calibrate-sparsity`, validated on read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import EffllmError, not_written
from ..config_reader import read_json
from ..files.atomic_write import atomic_file, check_writable
from ..files.model_folder_files import SPARSITY

FILE, FORMAT, VERSION = SPARSITY, "effllm-sparsity", 1


@dataclass(frozen=True)
class PredictorRates:
    """Quality of activation predictors on held-out text."""

    rank: int
    recall: tuple[float, ...]  # by layer: the share of active neurons that are predicted
    named: tuple[float, ...]  # by layer: the share of all neurons that are predicted

    @property
    def missed(self) -> float:
        """Share of active neurons that are not predicted, over all layers."""
        return 1 - float(np.mean(self.recall))

    def to_json(self) -> dict[str, object]:
        return {"rank": self.rank, "recall": [round(share, 5) for share in self.recall], "named": [round(share, 5) for share in self.named],
                "missed": round(self.missed, 5)}


@dataclass(frozen=True)
class Sparsity:
    """A model's activation sparsity, measured on a text."""

    tokens: int  # of the text
    active: tuple[float, ...]  # each layer's share of active neurons
    missed: Mapping[float, tuple[float, ...]]  # share of units with slots -> each layer's share of units that a token must read
    predictor: PredictorRates | None = None  # if predictors were trained

    def missed_at(self, share: float) -> float:
        """Share of all units that a token reads if a `share` of them have slots, interpolated linearly."""
        known = sorted(self.missed)
        return float(np.interp(share, [*known, 1.0], [*(float(np.mean(self.missed[point])) for point in known), 0.0]))

    def curve(self, layer: int) -> tuple[tuple[float, float], ...]:
        """(share of slots, share of the layer's units that a token reads), ascending."""
        return tuple((share, self.missed[share][layer]) for share in sorted(self.missed))

    def missed_with(self, shares: Sequence[float]) -> float:
        """Share of all units that a token reads with these shares of slots, one per layer."""
        missed_by_layer = []
        for layer, share in enumerate(shares):
            slots, missed = zip(*self.curve(layer), (1.0, 0.0), strict=True)
            missed_by_layer.append(np.interp(share, slots, missed))
        return float(np.mean(missed_by_layer))

    def to_json(self) -> dict[str, object]:
        return {"format": FORMAT, "version": VERSION, "tokens": self.tokens, "active": [round(share, 5) for share in self.active],
                "missed": {str(share): [round(value, 5) for value in layers] for share, layers in self.missed.items()},
                **({} if self.predictor is None else {"predictor": self.predictor.to_json()})}


def save(sparsity: Sparsity, folder: Path) -> Path:
    """Write `sparsity.json`. Raises EffllmError."""
    try:
        with atomic_file(folder / FILE) as file:
            file.write((json.dumps(sparsity.to_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise _not_saved(error, folder) from error
    return folder / FILE


def require_writable(folder: Path) -> None:
    """Raises EffllmError if `save` would."""
    try:
        check_writable(folder / FILE)
    except OSError as error:
        raise _not_saved(error, folder) from error


def _not_saved(error: OSError, folder: Path) -> EffllmError:
    return not_written(error, f"{folder / FILE} cannot be written", "copy the model to a folder that you can write to")


def load(folder: Path | None, layers: int) -> Sparsity | None:
    """The measurements of a folder's model; None without any, or for another number of layers."""
    if folder is None or not (folder / FILE).is_file():
        return None
    try:
        raw = read_json(folder / FILE)
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            return None
        missed = {float(share): tuple(map(float, values)) for share, values in dict(raw["missed"]).items()}
        rates = raw.get("predictor")
        predictor = None
        if rates is not None:
            predictor = PredictorRates(int(rates["rank"]), tuple(map(float, rates["recall"])), tuple(map(float, rates["named"])))
        sparsity = Sparsity(int(raw["tokens"]), tuple(map(float, raw["active"])), missed, predictor)
    except (EffllmError, KeyError, TypeError, ValueError, OverflowError):
        return None
    by_layer = [sparsity.active, *missed.values(), *(() if predictor is None else (predictor.recall, predictor.named))]
    has_valid_shape = missed and all(len(values) == layers for values in by_layer) and all(0 < share < 1 for share in missed)
    return sparsity if has_valid_shape and all(0 <= value <= 1 for values in by_layer for value in values) else None
