#!/usr/bin/env python3
"""Speed of GGUF files run in their own block formats, against our own 4-bit folder of the same random weights, all in effllm.

One set of random bf16 weights of a named shape is written once into --work, quantized by llama.cpp into each file and by `effllm quantize`
into the folder (the same files as compare_llamacpp.py). Each runs in its own process. A round runs every side in turns of a few tokens;
ratios are taken within a round, figures are medians over rounds. Token embedding and LM head are Q6_K in the files, 6 bits in the folder.

    python benchmarks/gguf_decode.py [--types Q4_0 Q4_K_M] [--quick] [--no-results]

Needs gguf and llama-cpp-python; wants the machine to itself for some minutes.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from platformdirs import user_cache_path

from benchmark_processes import SHAPE, Child, file_nbytes, peer_file, quantized_folder, random_folder, result_name
from compare_llamacpp import PROMPT, QUICK, TOKENS, Roof, Schedule, decode_round, median_seconds, prefill_round, thread_count_text
from effllm.runtime.measuring.synthetic import SHAPES
from report import Figure, parser_of, publish

OWN, FULL = "own 4-bit folder", Schedule(6, 3)
INTRO = ("Random weights, the same on all sides, all run by effllm; 16-bit KV cache; batch 1; medians over rounds in which the sides "
         "alternate. Roof: a load-only kernel over 1 GiB with the same threads, in the same round.")


def figures_of(sides: Sequence[Child], schedule: Schedule, roof: Roof, threads: int) -> Iterator[Figure]:
    """Decode and prefill of every side, and their ratios to the folder."""
    facts = {side.name: side.request("facts") for side in sides}
    for phase, one_round, count, work in (("decode", decode_round, schedule.decode, TOKENS),
                                          ("prefill", prefill_round, schedule.prefill, PROMPT)):
        rounds = [one_round(sides, roof, index) for index in range(count + 1)][1:]  # the first round warms up
        conditions = f"{len(rounds)} rounds of {work} tokens, {thread_count_text(threads)}"
        for side in sides:
            key = side.name.split()[0].lower()
            yield Figure(f"{phase}_{key}_tps", f"{phase}, {side.name}", conditions, work / median_seconds(rounds, side.name), "tokens/s")
            if side.name != OWN:
                yield Figure(f"{phase}_{key}_ratio", f"{phase}, {side.name} against {OWN}", conditions,
                             median(times[OWN] / times[side.name] for times in rounds), "×")
            if phase == "decode":
                nbytes = facts[side.name]["bytes_per_pass"]
                yield Figure(f"decode_{key}_roof", f"decode, {side.name}, share of the read roof", f"{nbytes / 1e9:.3f} GB a token",
                             median(nbytes * TOKENS / times[side.name] / times["roof"] for times in rounds), "")


def main() -> int:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q4_K_M"], help="files of llama-quantize to run")
    parser.add_argument("--shape", default=SHAPE, choices=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    arguments = parser.parse_args()
    threads = arguments.threads
    folder = random_folder(arguments.shape, arguments.work)
    paths = {OWN: quantized_folder(folder, "4", threads), **{kind: peer_file(folder, kind, threads) for kind in arguments.types}}
    sides = [Child(name, "own", path, threads) for name, path in paths.items()]
    roof = Roof(threads)
    figures = list(figures_of(sides, QUICK if arguments.quick else FULL, roof, threads))
    for side in sides:
        side.close()
    roof.close()
    figures += [Figure(f"file_{name.split()[0].lower()}_mb", f"file, {name}", "", file_nbytes(path) / 1e6, "MB")
                for name, path in paths.items()]
    publish(result_name("gguf-decode", arguments.shape), "GGUF files from their own codes", f"Shape: {arguments.shape}. {INTRO}", figures,
            keep=not arguments.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
