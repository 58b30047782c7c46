#!/usr/bin/env python3
"""Quality loss of low-bit weights, against llama.cpp's formats made from the same float32 weights, all scored by the same code.

Two tables. *format*: every file is dequantized into the float32 model, so that only its numbers count. *system*: llama.cpp's own logits,
and effllm's own kernels, on the same token ids. Bits per weight count every tensor of a file. A folder created by `effllm quantize`
(--ours, with its source model in --models) is compared with the line through llama.cpp's formats: log-KLD linear in bits per weight,
leaving out formats that another beats in both. Everything about llama.cpp is computed once and cached in --work.

    python benchmarks/weight_quality.py --text heldout.txt --calib calibration.txt [--models fable DIR] [--ours DIR ...]

A published model that exists only in few bits is first rewritten in another basis (`dequantized_gguf.py --spread`). Rows whose length
llama.cpp's blocks of 256 do not divide get its formats with blocks of 32 instead, which have more bits: the column *bpw* gives a file's
actual bits.

Needs torch, transformers, gguf and llama-cpp-python. `score_tensors(folder, tensors, windows)` scores a format that has no file yet.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from platformdirs import user_cache_path

from effllm.runtime.config import read_config
from effllm.runtime.tokenizer import Tokenizer
from llamacpp_formats import FORMATS, LINES, TABLES, Peers, Row, peers_at, ratio, select
from llamacpp_imatrix import TOKENS, calibration_ids
from llamacpp_score import Reference, Score, container, heldout_windows, reference, score_engine, score_tensors
from report import Figure, parser_of, publish

__all__ = ["Peers", "Score", "container", "heldout_windows", "peers_at", "ratio", "reference", "score_tensors"]

PACKAGED = Path(__file__).resolve().parents[1] / "models" / "fable"
DECODE_COLUMNS = 16
HEADINGS = ("file", "bpw", "body", "head", "KLD", "± s.e.", "median", "99%", "99.9%", "same top", "perplexity")
LEAST_BITS = {"8": 7.5, "6": 6.0, "5": 5.0, "4": 4.1, "3": 3.1}  # of the body: the line that a file is measured by


def score_row(name: str, bits: Sequence[float], score: Score) -> str:
    cells = (name, *(f"{value:.3f}" for value in bits), f"{score.kld_mean:.3e}", f"{score.kld_error:.0e}", f"{score.kld_median:.2e}",
             f"{score.kld_p99:.2e}", f"{score.kld_p999:.2e}", f"{100 * score.same_top:.2f}%", f"{score.ppl:.3f}")
    return f"| {' | '.join(cells)} |"


def peer_table(rows: Sequence[Row], table: str) -> str:
    """Markdown of one table, *format* or *system*."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|---|{'---:|' * (len(HEADINGS) - 1)}"]
    for row in rows:
        name = row.name + " + imatrix" * row.imatrix + (f", head {row.head}" if row.head else "")
        lines.append(score_row(name, (row.bpw, row.body_bpw, row.head_bpw), getattr(row, table)))
    return "\n".join(lines)


def line_for(body_bpw: float) -> str:
    """The named line of llama.cpp formats for a file with so many bits in its body."""
    return next((name for name, least in LEAST_BITS.items() if body_bpw >= least), "2")


class OneModel:
    """The rows of one model, and the results of effllm's folders relative to them."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.threads = folder, arguments.threads
        windows = heldout_windows(folder, arguments.text, arguments.ctx, arguments.windows)
        self.reference: Reference = reference(folder, windows, arguments.work)
        self.calibration = calibration_ids(arguments.calib, Tokenizer.load(folder, read_config(folder)), arguments.calib_tokens)
        self.peers = Peers(self.reference, arguments.work, self.calibration, arguments.threads)
        self.rows = [*self.peers.rows(arguments.formats, (False,), arguments.head),
                     *self.peers.rows(arguments.formats if arguments.imatrix is None else arguments.imatrix, (True,), arguments.head)]
        self.floor = self.peers.rows(("F32",), (False,))[0]
        self.figures: list[Figure] = []
        self.text = [f"## {folder.name}", *(self._table(table) for table in TABLES)]

    def _table(self, table: str) -> str:
        rows = self.rows if table == "format" else [self.floor, *self.rows]
        return f"*{table}*\n\n{peer_table(rows, table)}"

    def compare(self, ours: Path) -> Iterator[tuple[tuple[str, str, str], float]]:
        """((what, conditions, unit), figure) of one quantized folder: its ratios to the peers' line, its flips against the nearest peer;
        adds its rows to the text."""
        label, values, bits = container(ours)
        line = line_for(bits["body_bpw"])
        scores = {"format": self.reference.score_tensors(values), "system": score_engine(self.reference, ours, None, self.threads),
                  "decode": score_engine(self.reference, ours, DECODE_COLUMNS, self.threads)}
        shown = [f"| {' | '.join(HEADINGS)} |", f"|---|{'---:|' * (len(HEADINGS) - 1)}"]
        against = []
        for key, score in scores.items():
            table = "format" if key == "format" else "system"
            shown.append(score_row(f"{label}, {key}", (bits["bpw"], bits["body_bpw"], bits["head_bpw"]), score))
            for imatrix in (False, True):
                rows = select(self.rows, line, imatrix)
                if not rows:
                    continue
                least = min(row.bpw for row in rows)
                beyond = f", none of which has less than {least:.3f}: the line is extended" if len(rows) > 1 and bits["bpw"] < least else ""
                value, error = ratio(score, bits["bpw"], rows, table)
                flips = min(rows, key=lambda row: abs(row.bpw - bits["bpw"]))
                points = 100 * (getattr(flips, table).same_top - score.same_top)
                peers = f"{', '.join(row.name for row in rows)}{' with imatrix' * imatrix}"
                against.append(f"- {key}: {value:.3f} ± {error:.3f} of the line through {peers} at {bits['bpw']:.3f} bits "
                               f"({peers_at(rows, bits['bpw'], table):.3e}){beyond}; flips {points:+.2f} points against {flips.name}")
                yield (f"{label}: KLD over the peers' line", f"{key}, {peers}", "×"), value
                yield (f"{label}: flips against {flips.name}{' with imatrix' * imatrix}", key, "points"), points
        self.text += [f"### {label}", "\n".join(shown), "\n".join(against)]


def main() -> int:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--text", type=Path, required=True, help="held-out text, scored")
    parser.add_argument("--calib", type=Path, required=True, help="text of the importance matrix: .txt, or .jsonl.xz with a field text")
    parser.add_argument("--calib-tokens", type=int, default=TOKENS)
    parser.add_argument("--models", type=Path, nargs="+", default=[PACKAGED], help="model folders (default: the packaged fable)")
    parser.add_argument("--ours", type=Path, nargs="+", default=[], metavar="DIR",
                        help="quantized folders; as many for each model, in the order of --models")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=sorted({*FORMATS, *sum(LINES.values(), ())}), metavar="TYPE")
    parser.add_argument("--imatrix", nargs="*", choices=FORMATS, metavar="TYPE",
                        help="formats that are made with the importance matrix too (default: all of --formats)")
    parser.add_argument("--head", default="", help="llama.cpp's type of token embedding and output, such as Q8_0 (default: its own choice)")
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    parser.add_argument("--results", default="weight-quality", metavar="NAME", help="what the kept result is called (weight-quality)")
    arguments = parser.parse_args()
    if len(arguments.ours) % len(arguments.models):
        parser.error(f"{len(arguments.ours)} folders for {len(arguments.models)} models: give as many for each")
    torch.set_num_threads(arguments.threads)
    each = len(arguments.ours) // len(arguments.models)
    texts, medians, figures = [], {}, []
    for at, folder in enumerate(arguments.models):
        one = OneModel(folder, arguments)
        for ours in arguments.ours[at * each : (at + 1) * each]:
            for about, value in one.compare(ours):
                medians.setdefault(about, []).append(value)
        texts += one.text
        conditions = f"{folder.name}, {arguments.windows} windows of {arguments.ctx} tokens"
        for row in one.rows:
            for table in TABLES:
                key = f"{folder.name}_{row.name}{'_imatrix' * row.imatrix}_{table}".lower()
                name = f"{row.name}{' + imatrix' * row.imatrix}, {table}, {row.bpw:.3f} bits"
                figures.append(Figure(key, name, conditions, 1e3 * getattr(row, table).kld_mean, "KLD ×1e-3"))
    headline = [Figure(re.sub("[^a-z0-9]+", "_", f"{what} {conditions}".lower()), what, f"{conditions}; median of {len(values)}",
                       median(values), unit) for (what, conditions, unit), values in medians.items()]
    intro = "\n\n".join([
        f"KL divergence in nats from the float32 model, {arguments.windows} windows of {arguments.ctx} tokens; importance matrix from "
        f"{arguments.calib_tokens} tokens. F32 through llama.cpp is the floor of *system*.", *texts])
    publish(arguments.results, "Quality of low-bit weights", intro, headline + figures, keep=not arguments.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
