#!/usr/bin/env python3
"""Several answers at once against one after the other: tokens per second of all together, by how many there are.

    python benchmarks/at_once.py [--shape tinyllama-1.1b] [--bits 4] [--kv 16bit] [--depth 256] [--tokens 32] [--rounds 3]

Random weights. Every sequence first reads `--depth` tokens; then each number of them writes `--tokens` more, by turns with one that writes
as many alone, and the median of the rounds is printed. The tokens of each are those that it writes alone, which is checked.
"""

import argparse
import time
from statistics import median

import numpy as np

from effllm.offload.hardware import cpu_threads
from effllm.runtime.bench import prepare_synthetic
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.needed_kernels import Needs, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.rounds import Rounds
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.side_by_side import side_by_side

COUNTS = 1, 2, 4, 8


def written(engine: Engine, tokens: int):
    """Greedy steps of one sequence, as events."""
    yield from engine.generate(Sampler(SamplerSettings(temperature=0), engine.config.vocab_size), tokens, frozenset())


def run(engines: list[Engine], prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first token to the last of all that read before, and what each wrote."""
    rounds, said = Rounds(engines[0].shares), [[] for _ in engines]
    for i, (engine, prompt) in enumerate(zip(engines, prompts, strict=True)):
        list(engine.prefill(prompt))
        engine._logits = engine._logits.copy()  # a view, which the next prompt takes back
        rounds.begin(i, written(engine, tokens))
    started = time.perf_counter()
    while len(rounds):
        for key, step in rounds.round():
            if isinstance(step, Exception):
                raise step
            if step is not None:
                said[key].append(step.token)
    return time.perf_counter() - started, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--kv", default="16bit")
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cpu_threads())
    options = parser.parse_args()
    asked = EngineOptions(device="cpu", kv=options.kv, ctx=options.depth + options.tokens + 1, threads=options.threads,
                          parallel=max(COUNTS))
    spec = f"{options.bits}bit" if options.bits < 16 else None
    engine = list(open_prepared(lambda: prepare_synthetic(options.shape, asked, spec), kernel_kinds(Needs(spec is not None), asked)))[-1]
    engines, said = side_by_side(engine, max(COUNTS))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, engine.config.vocab_size, options.depth).tolist() for _ in engines]
    for _ in range(2):  # from the second time on a prompt's last token alone is read again, by another kernel
        alone = [run([each], [prompt], options.tokens)[1][0] for each, prompt in zip(engines, prompts, strict=True)]
    print(*said, f"{options.shape}, {spec or 'bf16'}, --kv {options.kv}, {options.depth} tokens deep, {options.threads} threads", sep="\n")
    for count in COUNTS:
        one, all_of_them = [], []
        for _ in range(options.rounds):
            one.append(run(engines[:1], prompts[:1], options.tokens)[0])
            seconds, wrote = run(engines[:count], prompts[:count], options.tokens)
            all_of_them.append(seconds)
            if wrote != alone[:count]:
                raise SystemExit("what was written at once is not what was written alone")
        rates = options.tokens / median(one), count * options.tokens / median(all_of_them)
        print(f"{count} at once: {rates[1]:.1f} tokens/s together, {rates[1] / count:.1f} each, {rates[1] / rates[0]:.2f} times as fast "
              f"as one after the other ({rates[0]:.1f})")
    engine.close()


if __name__ == "__main__":
    main()
