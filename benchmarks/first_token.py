#!/usr/bin/env python3
"""Time to first token and peak memory of `effllm run fable "…"`, from process start.

Each run is a fresh process of the `effllm` next to this interpreter; both figures are what it reports with --json. Warm: kernels already
compiled. Cold: an empty kernel cache each time.

    python benchmarks/first_token.py [--runs 11] [--cold-runs 3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from report import Figure, publish

PROMPT = "Tell me a story about the fox and the king."
INTRO = f'`effllm run fable "{PROMPT}" -n 60 --seed 1 --json`, files in the page cache.'


def run(cache: str | None) -> tuple[float, float]:
    """(seconds to the first token, peak memory in MB) of one process."""
    environment = dict(os.environ) if cache is None else {**os.environ, "XDG_CACHE_HOME": cache}
    command = [str(Path(sys.executable).with_name("effllm")), "run", "fable", PROMPT, "-n", "60", "--seed", "1", "--json"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    return answer["timings"]["ttft_s"], answer["memory"]["peak_rss_bytes"] / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--cold-runs", type=int, default=3)
    arguments = parser.parse_args()
    run(None)
    warm = [run(None) for _ in range(arguments.runs)]
    cold = []
    for _ in range(arguments.cold_runs):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run(cache))
    publish("first-token", "Time to the first token", INTRO, [
        Figure("ttft_warm_s", "first token, kernels compiled", f"median of {arguments.runs} processes", median(t for t, _ in warm), "s"),
        Figure("peak_warm_mb", "peak memory", "the same runs, the largest", max(m for _, m in warm), "MB"),
        Figure("ttft_cold_s", "first token, empty kernel cache", f"median of {arguments.cold_runs} processes",
               median(t for t, _ in cold), "s"),
    ])
    return 0


if __name__ == "__main__":
    sys.exit(main())
