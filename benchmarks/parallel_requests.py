#!/usr/bin/env python3
"""Several sequences in parallel against one after the other: total tokens per second by number of sequences.

    python benchmarks/parallel_requests.py [--shape tinyllama-1.1b] [--bits 4] [--kv 16bit] [--depth 256 1000] [--tokens 32] [--rounds 5]

Random weights. Every sequence first prefills `--depth` tokens; then each number of sequences generates `--tokens` more, alternating with
one that generates as many alone: ratios within a round, medians over rounds. Each must produce the same tokens as alone, which is checked.
"""

import argparse
import time
from statistics import median

import numpy as np

from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.generation.batching import open_sequences
from effllm.runtime.generation.scheduler import Scheduler
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from report import Figure, parser_of, publish

INTRO = ("Random weights; several answers written by one model at once, by turns with one of them alone. Each token of each is the one "
         "that it writes alone. Ratios of tokens a second within a round, medians over rounds.")
COUNTS = 1, 2, 4, 8


def written(engine: Engine, tokens: int):
    """Greedy steps of one sequence, as events."""
    yield from engine.generate(Sampler(SamplerSettings(temperature=0), engine.config.vocab_size), tokens, frozenset())


def run(engines: list[Engine], prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first token to the last of all sequences after their prompts, and what each generated."""
    rounds, tokens_of = Scheduler(engines[0].batched_passes), [[] for _ in engines]
    for i, (engine, prompt) in enumerate(zip(engines, prompts, strict=True)):
        list(engine.prefill(prompt))
        engine._logits = engine._logits.copy()  # a view, which the next prompt takes back
        rounds.begin(i, written(engine, tokens))
    started = time.perf_counter()
    while len(rounds):
        for key, step in rounds.step():
            if isinstance(step, Exception):
                raise step
            if step is not None:
                tokens_of[key].append(step.token)
    return time.perf_counter() - started, tokens_of


def measured(options: argparse.Namespace, depth: int) -> list[Figure]:
    """Figures after prompts of `depth` tokens."""
    engine_options = EngineOptions(device="cpu", kv=options.kv, ctx=depth + options.tokens + 1, threads=options.threads,
                                   parallel=max(COUNTS),
                                   spec="off")
    spec = f"{options.bits}bit" if options.bits < 16 else None
    engine = list(open_prepared(lambda: prepare_synthetic(options.shape, engine_options, spec),
                                kernel_kinds(Needs(spec is not None), engine_options)))[-1]
    engines, labels = open_sequences(engine, max(COUNTS))
    if labels:
        raise SystemExit("\n".join(map(str, labels)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, engine.config.vocab_size, depth).tolist() for _ in engines]
    for _ in range(2):  # from the second time on a prompt's last token alone is read again, by another kernel
        alone = [run([sequence], [prompt], options.tokens)[1][0] for sequence, prompt in zip(engines, prompts, strict=True)]
    figures, conditions = [], f"{spec or 'bf16'}, {depth} tokens deep, {options.threads} threads, {options.rounds} rounds"
    for count in COUNTS:
        rounds = []
        for _ in range(options.rounds):
            one, (seconds, wrote) = run(engines[:1], prompts[:1], options.tokens)[0], run(engines[:count], prompts[:count], options.tokens)
            rounds.append((options.tokens / one, count * options.tokens / seconds))
            if wrote != alone[:count]:
                raise SystemExit("what was written at once is not what was written alone")
        key = f"{count}_at_{depth}"
        if count > 1:
            figures.append(Figure(f"ratio_{key}", f"{count} at once, against one after the other", conditions,
                                  median(parallel_seconds / one for one, parallel_seconds in rounds), "×"))
        figures.append(Figure(key, f"{count} at once, together", conditions, median(parallel_seconds for _, parallel_seconds in rounds),
                              "tokens/s"))
    engine.close()
    return figures


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--kv", default="16bit")
    parser.add_argument("--depth", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures = [figure for depth in options.depth for figure in measured(options, depth)]
    shape, cache = ("" if each == usual else f"-{each}" for each, usual in ((options.shape, "tinyllama-1.1b"), (options.kv, "16bit")))
    intro = f"Shape: {options.shape}. {INTRO} Cache: {options.kv}."
    publish(f"at-once{shape}{cache}", "Several answers at once", intro, figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
