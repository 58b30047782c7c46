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
    """Quality of predictors of a rank, by layer, on held-out text: `recall`, the share of active neurons that they name, and `named`, the
    share of all neurons."""

    rank: int
    recall: tuple[float, ...]
    named: tuple[float, ...]

    @property
    def missed(self) -> float:
        """Share of active neurons that are not named, over all layers."""
        return 1 - float(np.mean(self.recall))

    def to_json(self) -> dict[str, object]:
        return {"rank": self.rank, "recall": [round(own, 5) for own in self.recall], "named": [round(own, 5) for own in self.named],
                "missed": round(self.missed, 5)}


@dataclass(frozen=True)
class Sparsity:
    """`active`: each layer's share of active neurons. `missed`: share of slots -> each layer's share of units that a token must read.
    `predictor`: if any were trained."""

    tokens: int
    active: tuple[float, ...]
    missed: Mapping[float, tuple[float, ...]]
    predictor: PredictorRates | None = None

    def missed_at(self, share: float) -> float:
        """Share of all units that a token reads if a `share` of them have slots, interpolated linearly."""
        known = sorted(self.missed)
        return float(np.interp(share, [*known, 1.0], [*(float(np.mean(self.missed[own])) for own in known), 0.0]))

    def curve(self, layer: int) -> tuple[tuple[float, float], ...]:
        """(share of slots, share of the layer's units that a token reads), ascending."""
        return tuple((share, self.missed[share][layer]) for share in sorted(self.missed))

    def missed_with(self, shares: Sequence[float]) -> float:
        """Share of all units that a token reads with these shares of slots, one per layer."""
        every = []
        for layer, share in enumerate(shares):
            known = (*self.curve(layer), (1.0, 0.0))
            every.append(np.interp(share, [own for own, _ in known], [missed for _, missed in known]))
        return float(np.mean(every))

    def to_json(self) -> dict[str, object]:
        return {"format": FORMAT, "version": VERSION, "tokens": self.tokens, "active": [round(share, 5) for share in self.active],
                "missed": {str(share): [round(own, 5) for own in layers] for share, layers in self.missed.items()},
                **({} if self.predictor is None else {"predictor": self.predictor.to_json()})}


def save(found: Sparsity, folder: Path) -> Path:
    """Write `sparsity.json`. Raises EffllmError."""
    try:
        with atomic_file(folder / FILE) as file:
            file.write((json.dumps(found.to_json(), indent=1) + "\n").encode())
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
        missed = {float(share): tuple(map(float, own)) for share, own in dict(raw["missed"]).items()}
        rates = raw.get("predictor")
        predictor = None
        if rates is not None:
            predictor = PredictorRates(int(rates["rank"]), tuple(map(float, rates["recall"])), tuple(map(float, rates["named"])))
        found = Sparsity(int(raw["tokens"]), tuple(map(float, raw["active"])), missed, predictor)
    except (EffllmError, KeyError, TypeError, ValueError, OverflowError):
        return None
    named = () if predictor is None else (predictor.recall, predictor.named)
    every = [*found.active, *(value for own in (*missed.values(), *named) for value in own)]
    valid = missed and all(len(own) == layers for own in (found.active, *missed.values(), *named)) and all(0 < own < 1 for own in missed)
    return found if valid and all(0 <= value <= 1 for value in every) else None
