#!/usr/bin/env python3
"""Decode and prefill while other programs compete for the cores, next to llama.cpp on the same random weights.

Machines are rarely idle while a model runs: a build runs, a video plays. For each number of busy processes (empty loops at normal priority)
the sides alternate, with as many threads as there are cores and with one less; for llama.cpp the better of the two counts, since its users
are advised to leave a core free. Ratios within a round, medians over rounds.

    python benchmarks/contended_cores.py [--bits 4] [--busy 0 1 2] [--rounds 5] [--no-results]

Needs gguf and llama-cpp-python.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from platformdirs import user_cache_path

from benchmark_processes import SHAPE, Child, own_folder, peer_file, random_folder
from effllm.offload.hardware import cpu_threads
from report import Figure, parser_of, publish

PEERS = {"4": "Q4_0", "3": "Q3_K_M", "2": "Q2_K", "8": "Q8_0"}
TOKENS, PROMPT, WARM = 32, 256, 4
SETTLE_S = 1.0  # until the system has spread the busy ones
INTRO = ("Random weights of TinyLlama's shape, the same on both sides; 16-bit cache; busy processes are loops that do nothing, at the "
         "usual priority. Medians over rounds in which the sides alternate; ratios within a round, against the better of llama.cpp's "
         "thread counts.")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """This many processes that keep a core busy each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one_round(sides: Sequence[Child]) -> dict[str, dict[str, float]]:
    """Seconds of a side's tokens and of its prompt."""
    taken: dict[str, dict[str, float]] = {"decode": {}, "prompt": {}}
    for side in sides:
        side.ask("clear")
        side.ask("forward", 1, WARM)
        taken["decode"][side.name] = side.ask("forward", TOKENS, 1)
        taken["prompt"][side.name] = side.ask("prefill", PROMPT)
    return taken


def figures(sides: Sequence[Child], own: Sequence[str], count: int, rounds: int, about: str) -> Iterator[Figure]:
    """`own`: names of our sides, the one with most threads first."""
    with busy(count):
        rounds_taken = [one_round(sides[:: 1 if index % 2 else -1]) for index in range(rounds + 1)][1:]
    load = f"{count} busy process{'es' * (count != 1)}"
    conditions = f"{about}, {load}, {rounds} rounds"
    for phase, work in (("decode", TOKENS), ("prompt", PROMPT)):
        times = {side.name: [result[phase][side.name] for result in rounds_taken] for side in sides}
        peer = min((name for name in times if name not in own), key=lambda name: median(times[name]))
        ratio = median(theirs / ours for theirs, ours in zip(times[peer], times[own[0]], strict=True))
        yield Figure(f"{phase}_{count}_ratio", f"{phase}, {own[0]} against {peer}", conditions, ratio, "×")
        yield from (Figure(f"{phase}_{count} {name}", f"{phase}, {name}", conditions, work / median(seconds), "tokens/s")
                    for name, seconds in times.items())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--bits", choices=PEERS, default="4")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="processes that want a core each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm-benchmarks"), help="where the files are made and kept")
    options = parser.parse_args()
    all_cores = cpu_threads()
    counts = [all_cores, *([all_cores - 1] if all_cores > 1 else [])]
    folder = random_folder(SHAPE, options.work)
    ours, theirs = own_folder(folder, options.bits, all_cores), peer_file(folder, PEERS[options.bits], all_cores)
    called = {count: f"{count} thread{'s' * (count > 1)}" for count in counts}
    sides_ours = [f"effllm, {called[count]}" for count in counts]
    sides = [Child(name, "own", ours, count) for name, count in zip(sides_ours, counts, strict=True)]
    sides += [Child(f"llama.cpp, {called[count]}", "peer", theirs, count) for count in counts]
    measured = [figure for count in options.busy for figure in figures(sides, sides_ours, count, options.rounds, f"{options.bits} bits")]
    for side in sides:
        side.close()
    publish("busy-machine", "A busy machine", INTRO, measured, keep=not options.no_results)


if __name__ == "__main__":
    main()
