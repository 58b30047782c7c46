#!/usr/bin/env python3
"""Quality loss of packed KV caches as programs run them: effllm and llama.cpp, each against itself with an exact cache.

Both read the same windows of a text page by page, 128 tokens at a time, and are scored where effllm's queries read packed pages; KL
divergence is taken from the same program with a float32 cache, so weights and other arithmetic cancel. effllm keeps the first 64 and the
newest 128 tokens exact, llama.cpp packs every token. Finished rows are kept in --work, so an interrupted run (--seconds) resumes.

    python benchmarks/kv_system.py --models DIR ... --text heldout.txt [--windows 64] [--seconds 280]

Models need their profile (`effllm eval kv-profile`). Needs llama-cpp-python.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from platformdirs import user_cache_path

from effllm.kernels.layout import PAGE
from effllm.runtime.measuring.evaluate import log_softmax
from effllm.runtime.prepare import EngineOptions
from kv_grid import opened
from kv_model import FIRST, Score, text_windows
from llamacpp_files import write_gguf
from llamacpp_run import CACHE, Peer
from report import Figure, parser_of, publish

OURS = ("8bit", "6bit", "5bit", "4bit", "3bit", "2bit")
THEIRS = tuple(name for name in CACHE if name not in ("f32", "f16"))
NAMESAKES = {"8bit": ("q8_0",), "5bit": ("q5_0", "q5_1"), "4bit": ("q4_0", "q4_1", "iq4_nl")}
BLOCK = 8  # windows whose exact answers are held at once

Answers = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Row:
    """A cache under test: `program`: whose exact output it is compared with; `bits` exclude sinks and window."""

    name: str
    program: str
    bits: float
    open: Callable[[], object]  # a context manager that yields Answers


@contextmanager
def engine_answers(folder: Path, kv: str, ctx: int, plain: bool, by_token: bool = False) -> Iterator[Answers]:
    """Logits [ctx - FIRST, V] of a window through effllm."""
    engine = opened(folder, EngineOptions(device="cpu", exact=True, threads=1, kv=kv, ctx=ctx, force=True), plain)

    def answers(window: Sequence[int]) -> np.ndarray:
        pieces = engine.score(window, 1, by_token=by_token)
        parts = [logits[max(0, FIRST - start) :].copy() for start, logits in pieces if start + len(logits) > FIRST]
        return np.concatenate(parts)

    try:
        yield answers
    finally:
        engine.close()


@contextmanager
def peer_answers(path: Path, kind: str, ctx: int) -> Iterator[Answers]:
    """The same through llama.cpp."""
    peer = Peer(path, ctx, 1, batch=PAGE, flash="on", keys=kind, values=kind)

    def answers(window: Sequence[int]) -> np.ndarray:
        peer.clear()
        return np.concatenate([np.array(peer.forward(window[at : at + PAGE])) for at in range(0, len(window), PAGE)])[FIRST:]

    try:
        yield answers
    finally:
        peer.close()


def rows(folder: Path, gguf: Path, ctx: int) -> Iterator[Row]:
    yield Row("effllm 16bit", "effllm", 16.0, lambda: engine_answers(folder, "16bit", ctx, False))
    for kv in OURS:
        for plain in (False, True):
            name = f"effllm {kv}{' without profile' if plain else ''}"
            yield Row(name, "effllm", int(kv[0]) + 0.53125, lambda kv=kv, plain=plain: engine_answers(folder, kv, ctx, plain))
    for kind in ("f16", *THEIRS):
        bits = {"f16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5, "iq4_nl": 4.5}[kind]
        yield Row(f"llama.cpp {kind}", "llama.cpp", bits, lambda kind=kind: peer_answers(gguf, kind, ctx))


def exact(folder: Path, gguf: Path, ctx: int, program: str) -> object:
    return engine_answers(folder, "32bit", ctx, False) if program == "effllm" else peer_answers(gguf, "f32", ctx)


class Kept:
    """Scores cached in a folder, one file per row, extended block after block of windows."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.until, self.left = folder, time.monotonic() + seconds, 0
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> Score | None:
        path = self.folder / f"{key}.npz".replace(" ", "_")
        if not path.exists():
            return None
        with np.load(path) as held:
            return Score(held["each"], held["flipped"])

    def add(self, key: str, new: Score) -> None:
        old = self.read(key)
        if old is not None:
            new = Score(np.concatenate([old.each, new.each]), np.concatenate([old.flipped, new.flipped]))
        np.savez(self.folder / f"{key}.npz".replace(" ", "_"), each=new.each, flipped=new.flipped)


def extend(kept: Kept, model: str, every: Sequence[Row], windows: np.ndarray, open_exact: Callable[[str], object]) -> None:
    """Extend all rows by one block of windows, then by the next."""
    for begin in range(0, len(windows), BLOCK):
        for program in ("effllm", "llama.cpp"):
            due = [row for row in every if row.program == program
                   and (0 if (held := kept.read(f"{model} {row.name}")) is None else len(held.each)) == begin]
            if due and time.monotonic() > kept.until:
                kept.left += len(due)
                continue
            block = windows[begin : begin + BLOCK].tolist()
            if due:
                with open_exact(program) as answers:
                    wanted = [answers(window) for window in block]
            for row in due:
                with row.open() as answers:
                    kept.add(f"{model} {row.name}", scored(wanted, [answers(window) for window in block]))


def scored(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> Score:
    each, flipped = [], []
    for there, here in zip(map(log_softmax, wanted), map(log_softmax, found), strict=True):
        each.append((np.exp(there) * (there - here)).sum(-1))
        flipped.append(there.argmax(-1) != here.argmax(-1))
    return Score(np.stack(each), np.stack(flipped))


def markdown(found: dict[str, tuple[float, Score]]) -> str:
    lines = ["| cache | packed bits | windows | KLD | ± s.e. | 99% | 99.9% | flips |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, (bits, score) in found.items():
        tail = f"{score.error:.0e} | {score.below(0.99):.2e} | {score.below(0.999):.2e} | {100 * score.flips:.2f}%"
        lines.append(f"| {name} | {bits:.3f} | {len(score.each)} | {score.kld:.3e} | {tail} |")
    return "\n".join(lines)


def ratios(found: dict[str, tuple[float, Score]]) -> Iterator[tuple[str, str, float]]:
    for kv, peers in NAMESAKES.items():
        for suffix in ("", " without profile"):
            bits, own = found[f"effllm {kv}{suffix}"]
            theirs = [found[f"llama.cpp {kind}"] for kind in peers]
            key = f"{kv}{suffix}".replace(" ", "_")
            best = min(score.kld * 4 ** (there - bits) for there, score in theirs)
            yield f"kld_{key}", f"{kv}{suffix}: KLD against the best of {', '.join(peers)} at equal bits", own.kld / best
            flips = min(score.flips * 2 ** (there - bits) for there, score in theirs)
            yield f"flips_{key}", f"{kv}{suffix}: flips against the best of them", own.flips / flips if flips else math.nan


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--ctx", type=int, default=832, help="64 + a multiple of 128")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "kv-system")
    parser.add_argument("--results", default="kv-system", metavar="NAME", help="what the file of results is called")
    options = parser.parse_args()
    kept, tables, every = Kept(options.work, options.seconds), [], []
    for folder in options.models:
        gguf = options.work / f"{folder.name}-f32.gguf"
        if not gguf.exists():
            write_gguf(folder, gguf.with_suffix(".unfinished"))
            gguf.with_suffix(".unfinished").rename(gguf)
        windows = text_windows(folder, options.text.read_text(encoding="utf-8"), options.windows, options.ctx)
        made = list(rows(folder, gguf, options.ctx))
        extend(kept, folder.name, made, windows, lambda program, f=folder, g=gguf: exact(f, g, options.ctx, program))
        found = {row.name: (row.bits, score) for row in made if (score := kept.read(f"{folder.name} {row.name}")) is not None}
        tables.append(f"## {folder.name}\n\n{markdown(found)}")
        if len(found) == len(made):
            every.append({key: (what, value) for key, what, value in ratios(found)})
    if kept.left:
        print("\n\n".join(tables) + f"\n\n{kept.left} blocks of windows are left: run it again")
        return
    figures = []
    for key, (what, _) in every[0].items():
        each = [one[key][1] for one in every]
        conditions = f"median of {len(each)} models; each: {', '.join(f'{v:.3f}' for v in each)}" if len(each) > 1 else "one model"
        figures.append(Figure(key, what, conditions, median(each), "×"))
    intro = f"{' '.join(__doc__.split(chr(10) * 2)[1].split())}\n\nWindows of {options.ctx} tokens.\n\n" + "\n\n".join(tables)
    publish(options.results, "Quality of packed KV caches as programs run them", intro, figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
