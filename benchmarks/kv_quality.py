#!/usr/bin/env python3
"""What packed keys and values cost in quality: effllm's record stage by stage, other programs' formats, and harder twins of a model.

Everybody is dequantized into one float32 model (*format* table), with the same exact tokens for every query: 64 sinks and the newest
128 to 255. KL divergence is taken from the same model with an exact cache, on the queries that see packed pages. Bits count all
metadata. A row that was scored is kept in --work, so a run that was stopped (--seconds) goes on where it ended.

    python benchmarks/kv_quality.py --models DIR ... --text heldout.txt --calib calibration.txt [--quick] [--seconds 280]

Needs torch, gguf and llama-cpp-python.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from platformdirs import user_cache_path

from effllm.offload.hardware import cpu_threads
from kv_codecs import Codec, Stages
from kv_model import KV, Harness, Model, Score, balance, profile, static_mean, text_windows
from kv_peers import block_peers, group_peers
from kv_twins import TWINS, verify
from report import Figure, publish

BITS = (8, 6, 5, 4, 3, 2)
PLAIN = {"balance": "none", "mean_k": "none", "rotate_k": "never", "rotate_v": False, "allocate": False, "search": False, "zeros": False}
# One after another, each on top of those before it.
LADDER = (("grids", {}), ("+ scale search", {"search": True}), ("+ zero search", {"zeros": True}),
          ("+ rotation of V", {"rotate_v": True}), ("+ rotation of K", {"rotate_k": "always"}),
          ("+ static mean of K", {"mean_k": "static"}),
          ("+ scales", {"balance": "scale"}), ("+ matrix of V", {"balance": "matrix"}), ("page mean of V too", {"mean_v": True}),
          ("+ profile's matrices", {"balance": "profile", "mean_v": False}), ("+ bits by groups", {"allocate": True}))
BLOCKS = {"8": ("q8_0",), "5": ("q5_0", "q5_1"), "4": ("q4_0", "q4_1", "iq4_nl")}


def ours(model: Model, calibration: object) -> Codec:
    return Codec(Stages(4, 4), *balance(model), static_mean(model, calibration), *profile(model, calibration))


def candidates(codec: Codec, ladder_bits: Sequence[int]) -> Iterator[tuple[str, float, KV]]:
    """(name, packed bits, format): the record at every width, the peers, then the ladder."""
    for bits in BITS:
        one = codec.with_stages(bits_k=bits, bits_v=bits)
        yield f"effllm {bits}", one.packed_bits, one
        free = one.with_stages(balance="matrix", allocate=False)
        yield f"effllm {bits} without profile", free.packed_bits, free.with_stages(mean_k="none")
    for peer in [*block_peers(), *group_peers()]:
        yield peer.name, peer.packed_bits, peer
    for bits in ladder_bits:
        taken = dict(PLAIN)
        for name, change in LADDER:
            taken |= change
            one = codec.with_stages(bits_k=bits, bits_v=bits, **taken)
            yield f"{bits}: {name}", one.packed_bits, one


class Rows:
    """Scores kept in a JSON file, by key."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.until = path, time.monotonic() + seconds
        self.rows: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
        self.left = 0

    def score(self, key: str, harness: Harness, kv: KV) -> Score | None:
        """None once the time is over."""
        if key not in self.rows:
            if time.monotonic() > self.until:
                self.left += 1
                return None
            self.rows[key] = asdict(harness.score(kv))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows, indent=1))
        return Score(**self.rows[key])


def on_line(rows: dict[str, tuple[float, Score]], names: Sequence[str], bits: float, flips: bool = False) -> float:
    """The peers' KLD (or flips) at `bits`: the least of them, each moved along 6.02 dB a bit to our exact bits."""
    each = [rows[name] for name in names]
    return min(score.flips * 2 ** (there - bits) if flips else score.kld * 4 ** (there - bits) for there, score in each)


def ratios(rows: dict[str, tuple[float, Score]]) -> Iterator[tuple[str, str, float]]:
    """(key, what, ratio) of the bars."""
    def block(width: str) -> list[str]:
        return [n for n in rows if n.split(" ")[0] in BLOCKS[width] and (width == "8" or "rotated" in n)]

    for width, label in (("8", "q8_0, best variant"), ("5", "best rotated 5-bit block"), ("4", "best rotated 4-bit block")):
        bits, score = rows[f"effllm {width}"]
        kld, flips = on_line(rows, block(width), bits), on_line(rows, block(width), bits, flips=True)
        yield f"kld_{width}_block", f"{width} bits: KLD against {label}, at equal bits", score.kld / kld
        yield f"flips_{width}_block", f"{width} bits: flips against {label}, at equal bits", _share(score.flips, flips)
    for width in (4, 3, 2):
        score, peer = rows[f"effllm {width}"][1], rows[f"KIVI-{width} g32"][1]
        yield f"kld_{width}_kivi", f"{width} bits: KLD against KIVI-{width} g32, which has more bits", score.kld / peer.kld
        yield f"flips_{width}_kivi", f"{width} bits: flips against KIVI-{width} g32", _share(score.flips, peer.flips)


def _share(a: float, b: float) -> float:
    return a / b if b else math.nan


def markdown(rows: dict[str, tuple[float, Score]]) -> str:
    lines = ["| format | packed bits | KLD | ± s.e. | 99% | flips |", "|---|---:|---:|---:|---:|---:|"]
    for name, (bits, score) in rows.items():
        lines.append(f"| {name} | {bits:.3f} | {score.kld:.3e} | {score.error:.0e} | {score.p99:.2e} | {100 * score.flips:.2f}% |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--ctx", type=int, default=832, help="64 + a multiple of 128")
    parser.add_argument("--quick", action="store_true", help="8 windows")
    parser.add_argument("--ladder", type=int, nargs="*", default=[4, 2], help="widths whose stages are taken apart")
    parser.add_argument("--twins", type=int, default=8, help="windows for the twins; 0: none")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "kv-quality")
    parser.add_argument("--no-keep", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(cpu_threads())
    windows = 8 if arguments.quick else arguments.windows
    text, calibration = (path.read_text(encoding="utf-8") for path in (arguments.text, arguments.calib))
    tables, every = [], []
    figures = []
    rows_file = Rows(arguments.work / "rows.json", arguments.seconds)
    for folder in arguments.models:
        model = Model(folder)
        ids = text_windows(folder, text, windows, arguments.ctx)
        calib = text_windows(folder, calibration, 8, arguments.ctx)
        harness = Harness(model, ids)
        rows = {}
        for name, bits, kv in candidates(ours(model, calib), arguments.ladder):
            score = rows_file.score(f"{folder.name} {windows}x{arguments.ctx} {name}", harness, kv)
            if score:
                rows[name] = (bits, score)
        tables.append(f"## {folder.name}: perplexity {harness.perplexity():.2f} on these tokens\n\n{markdown(rows)}")
        if not rows_file.left:
            every.append({key: (what, value) for key, what, value in ratios(rows)})
    if arguments.twins and not rows_file.left:
        text_of_twins, more = twins(arguments, text, calibration, rows_file)
        tables.append(text_of_twins)
        figures += more
    if rows_file.left:
        sys.stdout.write("\n\n".join(tables) + f"\n\n{rows_file.left} rows are left: run it again\n")
        return 0
    for key, (what, _) in every[0].items():
        each = [one[key][1] for one in every]
        figures.append(Figure(key, what, f"median of {len(each)} models; each: {', '.join(f'{v:.2f}' for v in each)}", median(each), "×"))
    intro = f"{__doc__.split(chr(10) * 2)[1]}\n\n{windows} windows of {arguments.ctx} tokens.\n\n" + "\n\n".join(tables)
    publish("kv-quality", "Quality of packed keys and values", intro, figures, keep=not arguments.no_keep)
    return 0


def twins(arguments: argparse.Namespace, text: str, calibration: str, kept: Rows) -> tuple[str, list[Figure]]:
    """The first model's twins at 4 bits: their KLD over the plain model's."""
    folder = arguments.models[0]
    model = Model(folder)
    ids = text_windows(folder, text, arguments.twins, arguments.ctx)
    calib = text_windows(folder, calibration, 8, arguments.ctx)
    plain, lines, figures = None, ["| twin | logits differ by | KLD, 4 bits | over the plain model |", "|---|---:|---:|---:|"], []
    for name, make in {"plain": lambda one: one, **TWINS}.items():
        twin = make(model)
        apart = verify(model, twin, ids[:1])
        score = kept.score(f"{folder.name} {arguments.twins}x{arguments.ctx} twin {name}", Harness(twin, ids), ours(twin, calib))
        if score is None:
            break
        plain = plain or score
        lines.append(f"| {name} | {apart:.0e} | {score.kld:.3e} | {score.kld / plain.kld:.2f}× |")
        if name != "plain":
            conditions = f"{folder.name}, {arguments.twins} windows of {arguments.ctx}"
            what = f"4 bits: KLD of the {name} twin over the plain model's"
            figures.append(Figure(f"twin_{name}", what, conditions, score.kld / plain.kld, "×"))
    return f"## Twins of {folder.name}\n\n" + "\n".join(lines), figures


if __name__ == "__main__":
    sys.exit(main())
