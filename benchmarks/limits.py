#!/usr/bin/env python3
"""This machine's rooflines, each measured on its own: memory, arithmetic, thread hand-off, disk, and process start.

Every speed that effllm reports is meant to be read as a fraction of one of these. Takes about a minute and wants the machine to itself;
needs 1 GiB of memory and, for the disk, 1 GiB in a folder on the disk that holds models. Prints a table, then one JSON line, and keeps both
in `results/limits-<machine>.md`.

    python benchmarks/limits.py                 # everything
    python benchmarks/limits.py memory start    # some of it, printed only
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import roofline_compute
import roofline_disk
import roofline_memory
import roofline_start
from effllm.offload.hardware import cpu_threads
from report import Figure, publish

PARTS = ("memory", "compute", "threads", "disk", "start")
INTRO = "What the hardware and the libraries below effllm reach here; the best of several passes, medians for the start of a process."


def measure(part: str, folder: Path) -> Iterator[Figure]:
    cores = cpu_threads()
    thread_counts = sorted({1, min(2, cores), cores})
    match part:
        case "memory":
            yield from roofline_memory.measure(thread_counts)
        case "compute":
            yield from roofline_compute.dot_product(thread_counts)
            yield from roofline_compute.matrix_product(thread_counts)
        case "threads":
            yield from roofline_compute.hand_off(cores)
        case "disk":
            yield from roofline_disk.measure(folder)
        case "start":
            yield from roofline_start.measure()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all, and keep the result)")
    parser.add_argument("--folder", type=Path, default=Path.home(), help="where the disk is measured (default: the home folder)")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    figures = []
    for part in arguments.parts or PARTS:
        for figure in measure(part, arguments.folder):
            print(f"{figure.what}, {figure.conditions}: {figure.value:.4g} {figure.unit}", file=sys.stderr, flush=True)
            figures.append(figure)
    publish("limits", "Roofs of this machine", INTRO, figures, keep=not arguments.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
