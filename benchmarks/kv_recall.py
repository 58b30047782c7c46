#!/usr/bin/env python3
"""Retrieval of numbers stated far back in the context, with a packed cache and an exact one: the share answered correctly.

Facts are within the first 30% or 95% of the context, questions after it; both caches get the same ones (`effllm eval recall`). A row is
meaningful for the cache only where the exact one is right at least 99 times out of 100.

    python benchmarks/kv_recall.py --models DIR ... --text heldout.txt [--ctx 512 1024 2048] [--kv 4bit 2bit]
"""

from pathlib import Path

from effllm.runtime.config import read_config
from effllm.runtime.measuring.recall import MIN_EXACT_ACCURACY, RecallResult, recall
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer
from kv_grid import opened
from report import Figure, parser_of, publish


def recall_of(folder: Path, text: str, ctx: int, kv: str) -> RecallResult:
    engines = [opened(folder, EngineOptions(device="cpu", exact=True, threads=1, kv=each, ctx=ctx, force=True), False)
               for each in (kv, "32bit")]
    try:
        *_, result = recall(*engines, Tokenizer.load(folder, read_config(folder)), text, ctx)
    finally:
        for engine in engines:
            engine.close()
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ctx", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--kv", nargs="+", default=["4bit", "2bit"])
    options = parser.parse_args()
    text, figures = options.text.read_text(encoding="utf-8"), []
    lines = ["| model | context | facts within | cache | numbers' tokens | right | right with an exact cache | counts |",
             "|---|---:|---:|---|---:|---:|---:|---|"]
    for folder in options.models:
        for ctx in options.ctx:
            for kv in options.kv:
                for row in recall_of(folder, text, ctx, kv).rows:
                    counts = "yes" if row.comparable else f"no: below {MIN_EXACT_ACCURACY:.0%}"
                    lines.append(f"| {folder.name} | {ctx} | {row.spread:.0%} | {kv} | {row.tokens} | {row.right:.2%} | "
                                 f"{row.right_exact:.2%} | {counts} |")
                    if row.comparable:
                        description = f"{folder.name}, {kv}, {ctx} tokens, facts within {row.spread:.0%}"
                        figures.append(Figure(f"{folder.name}_{ctx}_{row.spread:g}_{kv}", description, f"{row.tokens} tokens asked",
                                              row.right / row.right_exact, "of the exact cache's"))
    intro = f"{' '.join(__doc__.split(chr(10) * 2)[1].split())}\n\n" + "\n".join(lines)
    publish("kv-recall", "Recall over packed pages", intro, figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
