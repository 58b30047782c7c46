#!/usr/bin/env python3
"""Quality loss of packed keys and values: effllm's record stage by stage, other programs' formats, and variants of a model with harder
caches.

All formats are dequantized into one float32 model (*format* table), with the same exact tokens for every query: 64 sinks and the newest 128
to 255. KL divergence is taken from the same model with an exact cache, on the queries that see packed pages. Bits count all metadata.
Finished rows are kept in --work, so an interrupted run (--seconds) resumes.

    python benchmarks/kv_quality.py --models DIR ... --text heldout.txt --calib calibration.txt [--seconds 280]

Needs torch, gguf and llama-cpp-python.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from platformdirs import user_cache_path

from effllm.offload.hardware import cpu_threads
from effllm.quant.kv_basis import KVBasis
from effllm.runtime.kv.kv_profile import Profile
from kv_codecs import Codec, Exact, Packed, Stages
from kv_model import KV, Harness, Model, Score, balance, profile, static_mean, text_windows
from kv_peers import block_peers, group_peers
from kv_twins import EASIER, TWINS, verify
from report import Figure, publish

BITS = (8, 6, 5, 4, 3, 2)
PLAIN = {"balance": "none", "mean_k": "none", "rotate_k": "never", "rotate_v": False, "search": False, "zeros": False}
# One after another, each on top of those before it; then two that were left out.
LADDER = (("grids", {}), ("+ scale search", {"search": True}), ("+ zero search", {"zeros": True}),
          ("+ rotation of V", {"rotate_v": True}), ("+ rotation of K", {"rotate_k": "auto"}),
          ("+ scales of K, from weights", {"balance": "scale"}), ("+ matrix of V, from weights", {"balance": "matrix"}),
          ("static mean of K too", {"mean_k": "static"}), ("page mean of V too", {"mean_k": "none", "mean_v": True}))
BLOCKS = {"8": ("q8_0",), "5": ("q5_0", "q5_1"), "4": ("q4_0", "q4_1", "iq4_nl")}
COMPARED = (4, 3, 2)  # widths of KIVI
CALIBRATION = 16  # windows of the calibration text
BLOCK = 16  # windows scored at once
PARTS = ("k_scale", "k_matrix", "v_matrix", "strength_k", "strength_v")  # of a basis


def ours(model: Model, calibration: np.ndarray, kept: Path) -> tuple[Codec, Profile]:
    """The data-free codec and the profile, which is cached in the file `kept`."""
    if not kept.exists():
        made = profile(model, calibration)
        parts = {name: np.stack([getattr(basis, name) for basis in made.layers]) for name in PARTS}
        np.savez(kept, costs=np.array(made.costs), **parts)
    with np.load(kept) as held:
        layers = [KVBasis(**dict(zip(PARTS, layer, strict=True))) for layer in zip(*(held[name] for name in PARTS), strict=True)]
        recorded = Profile(tuple(layers), tuple(map(tuple, held["costs"])), "", calibration.size)
    return Codec(Stages(4, 4), *balance(model), static_mean(model, calibration)), recorded


def packed(recorded: Profile, bits: int) -> Packed:
    shared = recorded.bits(bits)
    return Packed(recorded.bases(shared), shared)


def plain(recorded: Profile, bits: int) -> Packed:
    """What the program does for a model of the same shape without a profile."""
    heads, size = recorded.layers[0].k_scale.shape
    return Packed([KVBasis.plain(heads, size)] * len(recorded.layers), [[(bits, bits)] * heads] * len(recorded.layers))


def compared(recorded: Profile) -> Iterator[tuple[str, float, KV]]:
    """(name, packed bits, format) of what the bars are about."""
    for bits in (4, 3, 2, 8, 5, 6):
        for name, one in ((f"effllm {bits}", packed(recorded, bits)), (f"effllm {bits} without profile", plain(recorded, bits))):
            yield name, one.packed_bits, one
    peers = [*block_peers(rotated=(True,), refit=(True,)), *group_peers(COMPARED)]
    for peer in peers:
        if not peer.name.startswith("affine"):
            yield peer.name, peer.packed_bits, peer
    yield "exact", 32.0, Exact()


def others(codec: Codec, recorded: Profile, ladder_bits: Sequence[int]) -> Iterator[tuple[str, float, KV]]:
    """What shows where it comes from: the other variants of the peers, and the record stage by stage."""
    for peer in [*block_peers(), *group_peers()]:
        yield peer.name, peer.packed_bits, peer
    for bits in ladder_bits:
        taken = dict(PLAIN)
        for name, change in LADDER:
            taken |= change
            one = codec.with_stages(bits_k=bits, bits_v=bits, **taken)
            yield f"{bits}: {name}", one.packed_bits, one
        even = [[(bits, bits)] * len(layer) for layer in recorded.bits(bits)]
        one = Packed(recorded.bases(even), even)
        yield f"{bits}: + profile's matrices, bits by groups", one.packed_bits, one
        yield f"{bits}: + bits by layer, head and side", one.packed_bits, packed(recorded, bits)


class Rows:
    """Scores cached in a folder, one file per row, extended block after block of windows."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.until, self.left = folder, time.monotonic() + seconds, 0
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / (key.replace("/", "_").replace(" ", "_") + ".npz")

    def read(self, key: str) -> Score | None:
        if not self._file(key).exists():
            return None
        with np.load(self._file(key)) as held:
            return Score(held["each"], held["flipped"])

    def extend(self, key: str, model: Model, ids: np.ndarray, begin: int, harness: list[Harness], kv: KV) -> None:
        """Score windows from `begin` on unless done already, while there is time. `harness` holds that of these windows once created."""
        old = self.read(key)
        if (0 if old is None else len(old.each)) != begin:
            return
        if time.monotonic() > self.until:
            self.left += 1
            return
        if not harness:
            harness.append(Harness(model, ids))
        new = harness[0].score(kv)
        if old is not None:
            new = Score(np.concatenate([old.each, new.each]), np.concatenate([old.flipped, new.flipped]))
        np.savez(self._file(key), each=new.each, flipped=new.flipped)


def on_line(rows: dict[str, tuple[float, Score]], names: Sequence[str], bits: float, flips: bool = False) -> float:
    """The peers' KLD (or flips) at `bits`: the least of them, each moved along 6.02 dB a bit to our exact bits."""
    each = [rows[name] for name in names]
    return min(score.flips * 2 ** (there - bits) if flips else score.kld * 4 ** (there - bits) for there, score in each)


def ratios(rows: dict[str, tuple[float, Score]]) -> Iterator[tuple[str, str, float]]:
    """(key, what, ratio) of the bars."""
    def block(width: str) -> list[str]:
        return [n for n in rows if n.split(" ")[0] in BLOCKS[width]]

    for width, label in (("8", "q8_0, rotated and refitted"), ("5", "the best rotated 5-bit block"), ("4", "the best rotated 4-bit block")):
        for suffix in ("", " without profile"):
            bits, score = rows[f"effllm {width}{suffix}"]
            kld, flips = on_line(rows, block(width), bits), on_line(rows, block(width), bits, flips=True)
            key = width + suffix.replace(" ", "_")
            yield f"kld_{key}_block", f"{width} bits{suffix}: KLD against {label}, at equal bits", score.kld / kld
            yield f"flips_{key}_block", f"{width} bits{suffix}: flips against {label}, at equal bits", _share(score.flips, flips)
    for width in COMPARED:
        for suffix in ("", " without profile"):
            score, peer = rows[f"effllm {width}{suffix}"][1], rows[f"KIVI-{width} g32"][1]
            key = f"{width}{suffix}".replace(" ", "_")
            yield f"kld_{key}_kivi", f"{width} bits{suffix}: KLD against KIVI-{width} g32, which has 0.47 bits more", score.kld / peer.kld
            yield f"flips_{key}_kivi", f"{width} bits{suffix}: flips against KIVI-{width} g32", _share(score.flips, peer.flips)


def _share(a: float, b: float) -> float:
    return a / b if b else math.nan


def markdown(rows: dict[str, tuple[float, Score]]) -> str:
    lines = ["| format | packed bits | windows | KLD | ± s.e. | 99% | 99.9% | flips |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, (bits, score) in rows.items():
        kld = f"{score.kld:.3e} | {score.error:.0e} | {score.below(0.99):.2e} | {score.below(0.999):.2e}"
        lines.append(f"| {name} | {bits:.3f} | {len(score.each)} | {kld} | {100 * score.flips:.2f}% |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64, help="of the formats compared")
    parser.add_argument("--few", type=int, default=8, help="windows of the other variants, the stages and the twins; 0: leave them out")
    parser.add_argument("--ctx", type=int, default=832, help="64 + a multiple of 128")
    parser.add_argument("--ladder", type=int, nargs="*", default=[4, 2], help="widths whose stages are taken apart")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--threads", type=int, default=cpu_threads())
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "kv-quality")
    parser.add_argument("--results", default="kv-quality", metavar="NAME", help="keep them under this name")
    parser.add_argument("--no-keep", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text, calibration = (path.read_text(encoding="utf-8") for path in (arguments.text, arguments.calib))
    kept = Rows(arguments.work, arguments.seconds)
    sections = [section for folder in arguments.models for section in of_model(arguments, folder, text, calibration)]
    if arguments.few:
        sections += of_twins(arguments, text, calibration)
    score_all(kept, sections)
    tables = [section.table(kept) for section in sections]
    if kept.left:
        sys.stdout.write("\n\n".join(tables) + f"\n\n{kept.left} blocks of windows are left: run it again\n")
        return 0
    every = [{key: (what, value) for key, what, value in ratios(section.rows(kept))} for section in sections if section.bars]
    figures = []
    for key, (what, _) in every[0].items():
        each = [one[key][1] for one in every]
        figures.append(Figure(key, what, f"median of {len(each)} models; each: {', '.join(f'{v:.2f}' for v in each)}", median(each), "×"))
    intro = f"{__doc__.split(chr(10) * 2)[1]}\n\nWindows of {arguments.ctx} tokens.\n\n" + "\n\n".join(tables)
    figures += twin_figures(kept, sections, arguments)
    publish(arguments.results, "Quality of packed keys and values", intro, figures, keep=not arguments.no_keep)
    return 0


def bits_table(recorded: Profile) -> str:
    """The bits that the profile gives each head."""
    lines = ["| mean bits | K and V of each head, layer by layer |", "|---:|---|"]
    for mean in BITS:
        layers = ", ".join(" ".join(f"{k}·{v}" for k, v in layer) for layer in recorded.bits(mean))
        lines.append(f"| {mean} | {layers} |")
    return "\n".join(lines)


@dataclass
class Section:
    """A table: formats scored on windows of one model. `bars`: its rows are what the headline ratios compare."""

    title: str
    prefix: str  # of the rows' keys
    model: Model
    ids: np.ndarray
    formats: list[tuple[str, float, KV]]
    after: str = ""
    bars: bool = False

    def rows(self, kept: Rows) -> dict[str, tuple[float, Score]]:
        found = ((name, bits, kept.read(f"{self.prefix} {name}")) for name, bits, _ in self.formats)
        return {name: (bits, score) for name, bits, score in found if score is not None}

    def table(self, kept: Rows) -> str:
        return f"## {self.title}\n\n{markdown(self.rows(kept))}\n\n{self.after}".rstrip()


def score_all(kept: Rows, sections: Sequence[Section]) -> None:
    """Every row's first block of windows, then the second of all, and so on: whatever exists when time is up can be compared."""
    longest = max(len(section.ids) for section in sections)
    for begin in range(0, longest, BLOCK):
        for section in sections:
            harness: list[Harness] = []
            ids = section.ids[begin : begin + BLOCK]
            for name, _, kv in section.formats if len(ids) else ():
                kept.extend(f"{section.prefix} {name}", section.model, ids, begin, harness, kv)


def of_model(arguments: argparse.Namespace, folder: Path, text: str, calibration: str) -> Iterator[Section]:
    model = Model(folder)
    calib = text_windows(folder, calibration, CALIBRATION, arguments.ctx)
    codec, recorded = ours(model, calib, arguments.work / f"profile_{folder.name}.npz")
    ids = text_windows(folder, text, max(arguments.windows, arguments.few), arguments.ctx)
    yield Section(folder.name, f"{folder.name} {arguments.ctx}", model, ids[: arguments.windows], list(compared(recorded)),
                  bits_table(recorded), bars=True)
    if arguments.few:
        yield Section(f"{folder.name}: other variants, and the record stage by stage", f"{folder.name} {arguments.ctx} few", model,
                      ids[: arguments.few], list(others(codec, recorded, arguments.ladder)))


def of_twins(arguments: argparse.Namespace, text: str, calibration: str) -> Iterator[Section]:
    """The first model's twins at 4 bits."""
    folder = arguments.models[0]
    model = Model(folder)
    ids = text_windows(folder, text, arguments.few, arguments.ctx)
    calib = text_windows(folder, calibration, CALIBRATION, arguments.ctx)
    (peer,) = block_peers(("q4_0",), (True,), (True,))
    for name, make in {"plain": lambda one: one, **TWINS}.items():
        twin = make(model)
        _, recorded = ours(twin, calib, arguments.work / f"profile_{folder.name}_{name}.npz")
        formats = ("effllm 4", packed(recorded, 4)), ("effllm 4 without profile", plain(recorded, 4)), (peer.name, peer)
        yield Section(f"{folder.name}, twin {name}: exact logits differ by {verify(model, twin, ids[:1]):.0e} of their deviation",
                      f"{folder.name} {arguments.ctx} twin {name}", twin, ids, [(label, kv.packed_bits, kv) for label, kv in formats])


def twin_figures(kept: Rows, sections: Sequence[Section], arguments: argparse.Namespace) -> Iterator[Figure]:
    """KLD of each twin over the plain model's, or over that of its own function with an easier cache."""
    twins = {section.prefix.rpartition(" ")[2]: section.rows(kept) for section in sections if " twin " in section.prefix}
    for twin, rows in twins.items():
        for name, (_, score) in rows.items() if twin != "plain" else ():
            easier = EASIER.get(twin, "plain")
            ratio = score.kld / twins[easier][name][1].kld
            yield Figure(f"twin_{twin}_{name}".replace(" ", "_"), f"4 bits, {name}: KLD of the {twin} twin over that of {easier}",
                         f"{arguments.models[0].name}, {arguments.few} windows of {arguments.ctx}", ratio, "×")


if __name__ == "__main__":
    sys.exit(main())
