#!/usr/bin/env python3
"""KL divergence of every pair of K and V bit widths, through the engine: which side needs its bits, as a table and a heat map.

Each pair is `effllm eval kld --kv kXvY` on the same windows of a text against the same model with an exact cache, using the model's profile
if it has one (`--plain`: without, all heads alike).

    python benchmarks/kv_grid.py --model models/fable --text heldout.txt [--windows 12] [--plain] [--no-results]

An SVG is written next to the table: the darker, the more divergence, on a logarithmic scale in ten shades.
"""

from collections.abc import Sequence
from math import log10
from pathlib import Path

from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.kv.kv_profile_run import without_profile
from effllm.runtime.measuring.evaluate import KldResult, kld, windows
from effllm.runtime.planning.needed_kernels import folder_kinds
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.tokenizer import Tokenizer
from report import RESULTS, Figure, machine_slug, parser_of, publish

WIDTHS = (8, 6, 5, 4, 3, 2)
CELL, MARGIN = 84, 56
INTRO = ("Mean KL divergence in nats from the same model with an exact cache, on tokens that read packed pages; 64 sinks and the newest "
         "128 to 255 tokens are exact. Rows: bits of K; columns: bits of V.")


def opened(folder: Path, options: EngineOptions, plain: bool) -> Engine:
    make = (lambda: without_profile(folder, options)) if plain else (lambda: prepare(folder, options))
    *_, engine = open_prepared(make, folder_kinds(folder, options))
    return engine


def scored(folder: Path, text: str, ctx: int, threads: int, plain: bool) -> dict[tuple[int, int], KldResult]:
    tokenizer, scores = Tokenizer.load(folder, read_config(folder)), {}
    reference = opened(folder, EngineOptions(device="cpu", exact=True, threads=threads, kv="32bit", ctx=ctx), plain)
    for k in WIDTHS:
        for v in WIDTHS:
            engine = opened(folder, EngineOptions(device="cpu", exact=True, threads=threads, kv=f"k{k}v{v}", ctx=ctx, force=True), plain)
            *_, scores[k, v] = kld(engine, reference, tokenizer, text, ctx)
            engine.close()
    reference.close()
    return scores


def matrix(scores: dict[tuple[int, int], KldResult]) -> str:
    rows = [f"| K {k} | " + " | ".join(f"{scores[k, v].kld_mean:.2g}" for v in WIDTHS) + " |" for k in WIDTHS]
    return "\n".join(["| | " + " | ".join(f"V {v}" for v in WIDTHS) + " |", "|---|" + "---:|" * len(WIDTHS), *rows])


def picture(scores: dict[tuple[int, int], KldResult], title: str) -> str:
    """The matrix as SVG; shades by the logarithm."""
    values = {pair: log10(max(result.kld_mean, 1e-12)) for pair, result in scores.items()}
    low, high = min(values.values()), max(values.values())
    size = MARGIN + CELL * len(WIDTHS) + 8
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size + 24}" font-family="ui-sans-serif, sans-serif"',
             ' font-size="15">',
             f'<rect width="{size}" height="{size + 24}" fill="white"/>', f'<text x="8" y="20">{title}</text>']
    for j, v in enumerate(WIDTHS):
        parts.append(_text(MARGIN + CELL * j + CELL / 2, MARGIN + 12, f"V {v}"))
    for i, k in enumerate(WIDTHS):
        y = MARGIN + 24 + CELL * i
        parts.append(_text(MARGIN / 2, y + CELL / 2 + 5, f"K {k}"))
        for j, v in enumerate(WIDTHS):
            share = (values[k, v] - low) / max(high - low, 1e-9)
            shade = [round(255 + share * (full - 255)) for full in (128, 24, 48)]
            x = MARGIN + CELL * j
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="rgb({shade[0]},{shade[1]},{shade[2]})"/>')
            parts.append(_text(x + CELL / 2, y + CELL / 2 + 5, f"{scores[k, v].kld_mean:.1e}", "white" if share > 0.55 else "black"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, fill: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="middle">{words}</text>'


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--ctx", type=int, default=832, help="64 + a multiple of 128")
    parser.add_argument("--plain", action="store_true", help="without the model's profile")
    options = parser.parse_args()
    text = first_windows(options.model, options.text.read_text(encoding="utf-8"), options.ctx, options.windows)
    scores = scored(options.model, text, options.ctx, options.threads, options.plain)
    name, keep = options.model.name + ("-plain" if options.plain else ""), not options.no_results
    figures = [Figure(f"k{k}v{v}", f"k{k}v{v}", f"{score.packed_bits:.2f} bits a value packed, {1 - score.same_top:.2%} of tokens changed",
                      score.kld_mean, "nats") for (k, v), score in scores.items()]
    intro = f"{INTRO} {scores[8, 8].tokens} tokens.\n\n{matrix(scores)}"
    if publish(f"kv-grid-{name}", f"Bits of keys and values: {name}", intro, figures, keep):
        picture_file = RESULTS / f"kv-grid-{name}-{machine_slug()}.svg"
        picture_file.write_text(picture(scores, f"KL divergence by bits of K and V: {name}"), encoding="utf-8")


def first_windows(folder: Path, text: str, ctx: int, count: int) -> str:
    """As much of the text as gives so many windows."""
    tokenizer = Tokenizer.load(folder, read_config(folder))
    cut: Sequence[list[int]] = windows(tokenizer, text[: 12 * ctx * count], ctx)
    return tokenizer.decode([token for window in cut[:count] for token in window])


if __name__ == "__main__":
    main()
