#!/usr/bin/env python3
"""One GGUF file in effllm and in llama.cpp: decode and prefill, both sides alternating, each in its own process.

A round runs both sides in turns of a few tokens; ratios are taken within a round, figures are medians over rounds. Random weights are fine:
`effllm export FOLDER -o FILE.gguf --type Q4_0` creates a file from any model folder.

    python benchmarks/gguf_vs_llamacpp.py FILE.gguf [--name NAME] [--quick] [--no-results]

Needs llama-cpp-python; wants the machine to itself for some minutes.
"""

import sys
from pathlib import Path
from statistics import median

from benchmark_processes import Child, file_nbytes
from compare_llamacpp import PROMPT, QUICK, TOKENS, Roof, Schedule, decode_round, median_seconds, prefill_round, thread_count_text
from report import Figure, parser_of, publish

OWN, PEER, FULL = "effllm", "llama.cpp", Schedule(6, 3)
INTRO = "One file on both sides; 16-bit KV cache; batch 1; medians over rounds in which the sides alternate."


def main() -> int:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", help="of the result, by default that of the file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    schedule, roof = QUICK if options.quick else FULL, Roof(options.threads)
    sides, figures = [Child(name, kind, options.file, options.threads) for name, kind in ((OWN, "own"), (PEER, "peer"))], []
    for phase, one_round, count, work in (("decode", decode_round, schedule.decode, TOKENS),
                                          ("prefill", prefill_round, schedule.prefill, PROMPT)):
        rounds = [one_round(sides, roof, index) for index in range(count + 1)][1:]  # the first round warms up
        conditions = f"{len(rounds)} rounds of {work} tokens, {thread_count_text(options.threads)}"
        figures += [Figure(f"{phase}_tps_{side.name.replace('.', '')}", f"{phase}, {side.name}", conditions,
                           work / median_seconds(rounds, side.name),
                           "tokens/s") for side in sides]
        figures.append(Figure(f"{phase}_ratio", f"{phase}, {OWN} against {PEER}", conditions,
                              median(times[PEER] / times[OWN] for times in rounds), "×"))
    for side in (*sides, roof):
        side.close()
    figures.append(Figure("file_mb", "file", "", file_nbytes(options.file) / 1e6, "MB"))
    publish(f"same-file-{options.name or options.file.stem}", f"{options.name or options.file.stem} in effllm and llama.cpp", INTRO,
            figures,
            keep=not options.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
