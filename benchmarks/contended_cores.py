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

from benchmark_processes import SHAPE, Child, peer_file, quantized_folder, random_folder
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
    """Context manager that keeps `count` cores busy, each by a process that loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def time_round(sides: Sequence[Child]) -> dict[str, dict[str, float]]:
    """Seconds of decode and of a prompt, by phase and side."""
    seconds: dict[str, dict[str, float]] = {"decode": {}, "prompt": {}}
    for side in sides:
        side.request("clear")
        side.request("forward", 1, WARM)
        seconds["decode"][side.name] = side.request("forward", TOKENS, 1)
        seconds["prompt"][side.name] = side.request("prefill", PROMPT)
    return seconds


def figures(sides: Sequence[Child], effllm_names: Sequence[str], count: int, rounds: int, about: str) -> Iterator[Figure]:
    """Figures with `count` busy processes. `effllm_names`: names of effllm's sides, the one with most threads first."""
    with busy(count):
        rounds_taken = [time_round(sides[:: 1 if index % 2 else -1]) for index in range(rounds + 1)][1:]
    load = f"{count} busy process{'es' * (count != 1)}"
    conditions = f"{about}, {load}, {rounds} rounds"
    for phase, work in (("decode", TOKENS), ("prompt", PROMPT)):
        times = {side.name: [result[phase][side.name] for result in rounds_taken] for side in sides}
        peer = min((name for name in times if name not in effllm_names), key=lambda name: median(times[name]))
        ratio = median(peer_seconds / effllm_seconds for peer_seconds,
                       effllm_seconds in zip(times[peer], times[effllm_names[0]], strict=True))
        yield Figure(f"{phase}_{count}_ratio", f"{phase}, {effllm_names[0]} against {peer}", conditions, ratio, "×")
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
    effllm_folder, peer_path = quantized_folder(folder, options.bits, all_cores), peer_file(folder, PEERS[options.bits], all_cores)
    labels = {count: f"{count} thread{'s' * (count > 1)}" for count in counts}
    effllm_names = [f"effllm, {labels[count]}" for count in counts]
    sides = [Child(name, "own", effllm_folder, count) for name, count in zip(effllm_names, counts, strict=True)]
    sides += [Child(f"llama.cpp, {labels[count]}", "peer", peer_path, count) for count in counts]
    measured = [figure for count in options.busy for figure in figures(sides, effllm_names, count, options.rounds, f"{options.bits} bits")]
    for side in sides:
        side.close()
    publish("busy-machine", "A busy machine", INTRO, measured, keep=not options.no_results)


if __name__ == "__main__":
    main()
