"""llama.cpp's formats on one model: files created, measured and scored once, cached in a work folder, and interpolated to any size.

A row is one file: a format, with or without importance matrix. *format* scores its dequantized tensors in the float32 model, *system*
llama.cpp's own logits.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from llamacpp_files import quantize, raw_config, read_back, sizes, write_gguf
from llamacpp_imatrix import importance
from llamacpp_run import Peer, quiet
from llamacpp_score import Reference, Score, resamples

FORMATS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_0", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q3_K_M", "Q2_K")
# The formats that a width is compared with: peers of about as many bits. One alone is a level, whatever our bits are.
LINES = {"8": ("Q8_0",), "6": ("Q6_K", "Q5_K_M"), "5": ("Q5_K_M", "Q4_K_M"), "4": ("Q4_0", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M"),
         "3": ("Q3_K_M", "Q2_K"), "2": ("Q3_K_M", "Q2_K")}
TABLES = ("format", "system")


@dataclass(frozen=True)
class Row:
    """One llama.cpp file. Bits per weight count every tensor; `body_bpw` excludes token embedding and output."""

    name: str
    imatrix: bool
    head: str
    bpw: float
    body_bpw: float
    head_bpw: float
    nbytes: int
    types: dict[str, int]
    format: Score
    system: Score

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, object]) -> Row:
        return cls(**{**raw, **{table: Score.from_json(raw[table]) for table in TABLES}})


class Peers:
    """The llama.cpp files of one reference model. `calibration`: token ids of the importance matrix's text."""

    def __init__(self, reference: Reference, work: Path, calibration: Sequence[int], threads: int = 2) -> None:
        self.reference, self.calibration, self.threads = reference, list(calibration), threads
        self.folder = work / f"{reference.folder.name}-{reference.weights_key}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.text_key = hashlib.sha256(np.array(self.calibration, np.int64).tobytes()).hexdigest()[:8]
        self.kept = self.folder / f"peers-{reference.key.partition('-')[2]}-{self.text_key}-{llama_cpp.__version__}.json"
        quiet()

    @property
    def source(self) -> Path:
        """The float32 weights as GGUF."""
        path = self.folder / "source-f32.gguf"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            write_gguf(self.reference.folder, unfinished, "f32")
            unfinished.rename(path)
        return path

    def importance(self) -> dict[str, np.ndarray]:
        path = self.folder / f"imatrix-{self.text_key}.npz"
        if not path.exists():
            np.savez(path, **importance(self.reference.model, self.calibration))
        with np.load(path) as data:
            return dict(data)

    def file(self, name: str, imatrix: bool, head: str = "") -> Path:
        """The quantized file, created once. `F32` is the source itself."""
        if name == "F32":
            return self.source
        path = self.folder / f"{name}{f'-imatrix-{self.text_key}' if imatrix else ''}{f'-head-{head}' if head else ''}.gguf"
        if not path.exists():
            quantize(self.source, path, name, self.threads, self.importance() if imatrix else None, head or None)
        return path

    def rows(self, formats: Sequence[str] = FORMATS, imatrix: Sequence[bool] = (False, True), head: str = "") -> list[Row]:
        """Score what is not kept yet, tell of it on stderr, return all in order. `head`: type of the token embedding, llama.cpp's choice
        if empty."""
        kept = {self._key(row): row for row in self._load()}
        out = []
        for with_imatrix in imatrix:
            for name in formats:
                key = (name, with_imatrix, head)
                if key not in kept:
                    kept[key] = self._score(name, with_imatrix, head)
                    self._save(list(kept.values()))
                    row = kept[key]
                    print(f"{self.reference.folder.name} {name}{' imatrix' * with_imatrix} {row.bpw:.3f} bpw: "
                          f"KLD {row.format.kld_mean:.3e} format, {row.system.kld_mean:.3e} system", file=sys.stderr, flush=True)
                out.append(kept[key])
        return out

    def _score(self, name: str, imatrix: bool, head: str) -> Row:
        path = self.file(name, imatrix, head)
        tensors = read_back(path, raw_config(self.reference.folder))
        return Row(name, imatrix, head, **sizes(path), format=self.reference.score_tensors(tensors), system=self._system(path))

    def _system(self, path: Path) -> Score:
        ctx = self.reference.windows.shape[1]
        peer = Peer(path, ctx, self.threads)

        def logits():
            for window in self.reference.windows.tolist():
                peer.clear()
                yield peer.forward(window)

        try:
            return self.reference.score(logits())
        finally:
            peer.close()

    @staticmethod
    def _key(row: Row) -> tuple[str, bool, str]:
        return row.name, row.imatrix, row.head

    def _load(self) -> list[Row]:
        return [Row.from_json(raw) for raw in json.loads(self.kept.read_text())] if self.kept.exists() else []

    def _save(self, rows: list[Row]) -> None:
        unfinished = self.kept.with_suffix(".unfinished")
        unfinished.write_text(json.dumps([row.to_json() for row in rows]))
        unfinished.rename(self.kept)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of (bits, KLD) points by bits: a bad format must not raise the line."""
    kept: list[tuple[float, float]] = []
    for bits, kld in sorted(points):
        if not kept or kld < kept[-1][1]:
            kept.append((bits, kld))
    return kept


def line(points: Sequence[tuple[float, float]], bpw: float) -> float:
    """KLD of the peers at `bpw`: log-KLD linear in bits between neighbours of the front, the end segments extended beyond it. One point
    alone is a level."""
    at = front(points)
    if len(at) == 1:
        return at[0][1]
    right = min(max(1, next((i for i, (bits, _) in enumerate(at) if bits >= bpw), len(at) - 1)), len(at) - 1)
    (x0, y0), (x1, y1) = at[right - 1], at[right]
    share = (bpw - x0) / (x1 - x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


def peers_at(rows: Sequence[Row], bpw: float, table: str = "format", body: bool = False) -> float:
    """The line through `rows` at `bpw` bits per weight, over all tensors (or over the body)."""
    return line([(row.body_bpw if body else row.bpw, getattr(row, table).kld_mean) for row in rows], bpw)


def ratio(ours: Score, bpw: float, rows: Sequence[Row], table: str = "format") -> tuple[float, float]:
    """(our KLD divided by the line's at our bits, its standard error by paired bootstrap over windows). Scores must be on the same windows.
    """
    drawn = resamples(len(ours.window_kld))
    mine = np.array(ours.window_kld)[drawn].mean(1)
    theirs = [(row.bpw, np.array(getattr(row, table).window_kld)[drawn].mean(1)) for row in rows]
    spread = [kld / line([(bits, means[i]) for bits, means in theirs], bpw) for i, kld in enumerate(mine)]
    return ours.kld_mean / peers_at(rows, bpw, table), float(np.std(spread))


def select(rows: Sequence[Row], line_name: str, imatrix: bool) -> list[Row]:
    """The rows of a named line (`LINES`)."""
    return [row for row in rows if row.name in LINES[line_name] and row.imatrix == imatrix]
