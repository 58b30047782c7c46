#!/usr/bin/env python3
"""Do pages with unequal bits pay? `--kv 4bit` next to the same average bits distributed by each policy, through the engine.

KL divergence from the same model with an exact cache, in nats, on tokens that read packed pages; with the model's profile and without.
Ratios are at equal bits: adjusted by 6.02 dB per bit from the bits a cache ended up with, since a share of few pages is rounded up.

    python benchmarks/kv_policies.py --models DIR ... --text heldout.txt [--kv 4bit] [--windows 8] [--ctx 1600]
"""

from pathlib import Path

from effllm.runtime.config import read_config
from effllm.runtime.measuring.evaluate import KldResult, kld
from effllm.runtime.policy import POLICIES
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer
from kv_grid import first_windows, opened
from report import Figure, parser_of, publish


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kv", default="4bit", choices=("3bit", "4bit", "5bit", "6bit"))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=1600, help="64 + a multiple of 128")
    options = parser.parse_args()
    figures, text = [], options.text.read_text(encoding="utf-8")
    lines = ["| model | cache | packed bits | tokens | KLD | 99% | same top token |", "|---|---|---:|---:|---:|---:|---:|"]
    for folder in options.models:
        cut, tokenizer = first_windows(folder, text, options.ctx, options.windows), Tokenizer.load(folder, read_config(folder))
        reference = opened(folder, EngineOptions(device="cpu", exact=True, threads=options.threads, kv="32bit", ctx=options.ctx), False)
        for plain in (False, True):
            alike: KldResult | None = None
            for kv in (options.kv, *(f"{options.kv}+{name}" for name in POLICIES)):
                engine_options = EngineOptions(device="cpu", exact=True, threads=options.threads, kv=kv, ctx=options.ctx, force=True)
                engine = opened(folder, engine_options, plain)
                *_, result = kld(engine, reference, tokenizer, cut, options.ctx)
                engine.close()
                name = f"{folder.name}, {kv}{', without profile' if plain else ''}"
                lines.append(f"| {folder.name} | {kv}{', without profile' if plain else ''} | {result.packed_bits:.3f} | {result.tokens} | "
                             f"{result.kld_mean:.2e} | {result.kld_p99:.2e} | {result.same_top:.2%} |")
                if alike is None:
                    alike = result
                    continue
                ratio = result.kld_mean / alike.kld_mean * 4 ** (result.packed_bits - alike.packed_bits)
                figures.append(Figure(name.replace(", ", "_").replace(" ", "_"), f"{name}: KLD over that of {options.kv}",
                                      f"{options.windows} windows of {options.ctx}, at equal bits", ratio, "×"))
        reference.close()
    intro = f"{' '.join(__doc__.split(chr(10) * 2)[1].split())}\n\n" + "\n".join(lines)
    publish("kv-policies", "Pages of unequal bits", intro, figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
