#!/usr/bin/env python3
"""Passes of a model with two checkouts of effllm, alternating in one run: what a kernel change is worth.

Each checkout runs in its own process, which imports the package from that folder. A round alternates between the checkouts with passes of
the given numbers of tokens (from 17 on: a prompt); ratios are taken within a round, figures are medians over rounds. With --depth each
number of tokens starts with a context of that length, prefilled anew, followed by several passes per turn: the more passes, the deeper they
get, and the conditions state the range.

    git worktree add /somewhere/effllm COMMIT
    python benchmarks/compare_checkouts.py /somewhere/effllm [--model DIR] [--tokens 1 2 4 8 16] [--depth N] [--kv BITS] [--rounds 25]

The other side is this checkout; both folders must be called `effllm`. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES force another instruction set
on both. `--model` takes a folder or random weights in memory, `synthetic:SHAPE:BITS`; the default is TinyLlama's shape at 4 bits.
"""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmark_processes import CTX
from report import Figure, parser_of, publish

HERE = Path(__file__).resolve().parent
PROMPT = 17  # tokens from which a pass is a prompt: no draft is longer
PASSES_PER_ROUND = 8  # passes of a turn at a depth
# Answers every line of its input, a number of tokens, with the seconds that they took and the tokens that were held before; "begin" reads
# the text of `depth` tokens into an empty cache.
SIDE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from benchmark_processes import EffllmSide
prompt, depth, turn, ctx = map(int, sys.argv[4:8])
side = EffllmSide(sys.argv[2], int(sys.argv[3]), ctx, sys.argv[8])
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "begin":
        print(side.prefill(depth), 0, flush=True)
        continue
    count = int(line)
    held = len(side.engine.tokens)
    if depth:
        started = time.perf_counter()
        for _ in range(turn):
            side.forward(count)
        print((time.perf_counter() - started) / turn, held, flush=True)
        continue
    side.clear()
    if count >= prompt:
        print(side.prefill(count), 0, flush=True)
        continue
    side.forward(8)
    started = time.perf_counter()
    side.forward(count)
    print(time.perf_counter() - started, 8, flush=True)
"""
INTRO = "Passes of one model by two checkouts that take turns in every round. Ratios within a round, medians over rounds."


class Side:
    """One checkout's process."""

    def __init__(self, checkout: Path, model: str, threads: int, depth: int, ctx: int, kv: str) -> None:
        numbers = map(str, (threads, PROMPT, depth, PASSES_PER_ROUND, ctx))
        command = [sys.executable, "-c", SIDE, str(HERE), model, *numbers, kv]
        self._child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(checkout.parent)}, stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        if self._child.stdout.readline() != "ready\n":
            sys.exit(f"the side of {checkout} did not start")

    def begin(self) -> None:
        """Hold the context of `depth` tokens and nothing after it, whatever came before."""
        self._ask("begin")

    def seconds(self, tokens: int) -> tuple[float, int]:
        """Of a pass, and the tokens that were held before it; of a turn of passes, their mean and the tokens before the first."""
        return self._ask(str(tokens))

    def _ask(self, order: str) -> tuple[float, int]:
        self._child.stdin.write(f"{order}\n")
        self._child.stdin.flush()
        seconds, num_tokens = self._child.stdout.readline().split()
        return float(seconds), int(num_tokens)

    def close(self) -> None:
        with self._child:  # until it has ended
            self._child.stdin.close()


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("other", type=Path)
    parser.add_argument("--model", default="synthetic:tinyllama-1.1b:4", help="a folder, or random weights: synthetic:SHAPE:BITS")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--depth", type=int, default=0, help="tokens before the passes (default: a few)")
    parser.add_argument("--kv", default="16bit")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--results", default="two-checkouts", metavar="NAME", help="keep them under this name")
    options = parser.parse_args()
    other = options.other.resolve()
    if other.name != HERE.parent.name or not (other / "pyproject.toml").is_file():
        sys.exit(f"{options.other} is no checkout in a folder called {HERE.parent.name}")
    described = subprocess.run(["git", "describe", "--always", "--abbrev=10"], cwd=other, capture_output=True, text=True, check=True)
    before = described.stdout.strip()
    ctx = max(CTX, max(options.tokens) + 1)
    if options.depth:
        ctx = options.depth + (options.rounds + 1) * PASSES_PER_ROUND * max(options.tokens)
    model = options.model if options.model.startswith("synthetic:") else str(Path(options.model).resolve())
    sides = [Side(checkout, model, options.threads, options.depth, ctx, options.kv) for checkout in (other, HERE.parent)]
    figures, target = [], f", for {os.environ['NUMBA_CPU_NAME']}" if "NUMBA_CPU_NAME" in os.environ else ""
    for tokens in options.tokens:
        if options.depth:
            for side in sides:
                side.begin()
        rounds_of_sides = [[side.seconds(tokens) for side in sides] for _ in range(options.rounds + 1)][1:]  # the first wakes the threads
        rounds = [[seconds for seconds, _ in times] for times in rounds_of_sides]
        first, last = rounds_of_sides[0][0][1], rounds_of_sides[-1][0][1] + PASSES_PER_ROUND * tokens
        where = f"{f', at depths of {first} to {last} tokens' if options.depth else ''}, --kv {options.kv}"
        conditions = f"{Path(model).name}, {options.threads} threads, {options.rounds} rounds{where}{target}"
        figures += [Figure(f"ratio_{tokens}", f"{tokens} tokens, against {before}", conditions, median(a / b for a, b in rounds), "×"),
                    Figure(f"before_{tokens}", f"{tokens} tokens, {before}", conditions, 1e3 * median(a for a, _ in rounds), "ms"),
                    Figure(f"after_{tokens}", f"{tokens} tokens, this one", conditions, 1e3 * median(b for _, b in rounds), "ms")]
    for side in sides:
        side.close()
    publish(options.results, "Two checkouts", INTRO, figures, keep=not options.no_results)


if __name__ == "__main__":
    main()
