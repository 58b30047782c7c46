#!/usr/bin/env python3
"""Peak memory of `effllm quantize`: random bf16 weights of a large shape, to 4 bits, measured from outside the process.

    python benchmarks/quantize_memory.py [--shapes llama3-8b tinyllama-1.1b] [--work DIR] [--no-results]

The weights are one megabyte of random numbers repeated, in shards as on a hub: memory depends on shapes alone, and this is written as fast
as the disk allows. The folders are removed afterwards; the largest takes 16 GB, and its result 5. The profile for packed caches is left
out: it is a run of the result, whose memory is what `effllm plan` reports.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from platformdirs import user_cache_path

from benchmark_processes import file_nbytes, quantize_effllm
from effllm.runtime.measuring.synthetic import SHAPES, SyntheticStore, synthetic_config
from report import Figure, parser_of, publish
from synthetic_folder import of_store, write_folder

INTRO = ("`effllm quantize --bits 4 --method rtn` of random bf16 weights, {threads} threads, without the profile for packed caches. Peak: "
         "VmHWM of the process, mapped files and the program itself included.")
FREE_SPACE_FACTOR = 1.4  # free space over the weights' bytes: the result, and what others write meanwhile


def measured(shape: str, work: Path, threads: int) -> Iterator[Figure]:
    """The figures of a shape. Raises SystemExit if the disk has no room for it."""
    store = SyntheticStore(synthetic_config(shape))
    nbytes = sum(info.nbytes for info in store.tensors.values())
    if (free := shutil.disk_usage(work).free) < FREE_SPACE_FACTOR * nbytes:
        needed = FREE_SPACE_FACTOR * nbytes
        raise SystemExit(f"{shape}: {needed / 1e9:.0f} GB of disk are needed, {free / 1e9:.0f} are free: --work for another disk")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        source, out = Path(folder) / "bf16", Path(folder) / "4bit"
        write_folder(source, SHAPES[shape], [[tensor] for tensor in of_store(store)], lambda name: store.read(store.tensors[name]))
        cost = quantize_effllm(source, out, "4", ("--method", "rtn", "--threads", str(threads)))
        result_nbytes = file_nbytes(out)
    largest = max(prod(info.shape) for info in store.tensors.values())
    under = f"{nbytes / 1e9:.1f} GB, {len(store.tensors)} tensors, the largest of {largest / 1e6:.0f} M weights"
    yield Figure(f"{shape}_peak_mb", f"{shape}: peak memory", under, cost.peak_nbytes / 1e6, "MB")
    yield Figure(f"{shape}_anonymous_mb", f"{shape}: peak without mapped files", under, cost.anonymous_nbytes / 1e6, "MB")
    yield Figure(f"{shape}_file_gb", f"{shape}: what was written", "4 bits, embedding and head 6", result_nbytes / 1e9, "GB")
    yield Figure(f"{shape}_s", f"{shape}: time", "of the whole process, other programs beside it", cost.seconds, "s")


def main() -> int:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--shapes", nargs="+", default=["llama3-8b", "tinyllama-1.1b"], choices=list(SHAPES))
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    figures = [figure for shape in options.shapes for figure in measured(shape, options.work, options.threads)]
    publish("quantize-memory", "Memory of quantizing", INTRO.format(threads=options.threads), figures, keep=not options.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
