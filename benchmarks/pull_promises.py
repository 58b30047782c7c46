#!/usr/bin/env python3
"""What a pull promises, held on weights of a real size: random bf16 weights of the 1.1B shape in six shards, from a hub on the loopback.

The plan is asked first, for the bytes it read and the sizes it foretells. `pull --bits 4` runs while the disk that its home takes is
summed. A plain pull is then killed (SIGKILL) when the storage has sent a random share of the whole, ten times, and resumed each time: every
file's sha256 must be right at the end, and what the storage sent beyond the whole is what the kills cost.

    python benchmarks/pull_promises.py [--kills 10] [--discard]
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from hub_server import Hub, running
from hub_user import FABLE, HubUser, sharded
from platformdirs import user_cache_path

from benchmark_processes import random_folder
from effllm.offload import transfer
from report import Figure, publish

REPO, SHAPE, SHARDS = "org/large", "tinyllama-1.1b", 6
WEIGHTS = ".safetensors"


def files_of(folder: Path) -> dict[str, bytes]:
    """The folder's weights in shards, with the packaged model's tokenizer."""
    tokenizer_files = {path.name: path.read_bytes() for path in FABLE.iterdir() if path.name.startswith("tokenizer")}
    return tokenizer_files | {name: data for name, data in sharded(folder, SHARDS).items() if name.endswith((WEIGHTS, ".json"))}


def allocated(folder: Path) -> int:
    """Bytes of disk below a folder; files may go while they are counted."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(where, name))
            except FileNotFoundError:
                continue
            total += 512 * status.st_blocks
    return total


def ended(process: subprocess.Popen) -> None:
    _, error_output = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the pull ended with {process.returncode}: {error_output[-500:]}")


def peak_of(process: subprocess.Popen, folder: Path) -> int:
    """The most that a folder takes while a process runs."""
    reader, peak = threading.Thread(target=ended, args=(process,)), 0
    reader.start()
    while reader.is_alive():
        peak = max(peak, allocated(folder))
        time.sleep(0.02)
    reader.join()
    return peak


def planned_and_kept(hub: Hub, person: HubUser) -> Iterator[Figure]:
    files = hub.repos[REPO].files
    total, largest = sum(map(len, files.values())), max(len(data) for name, data in files.items() if name.endswith(WEIGHTS))
    conditions = f"{total / 1e9:.2f} GB in {SHARDS} shards"
    hub.forget()
    process = person.start("pull", REPO, "--bits", "4", "--dry-run", "--json")
    out, error_output = process.communicate()
    if process.returncode != 0:
        raise SystemExit(error_output)
    plan = json.loads(out)
    yield Figure("plan_kb", "read before the first byte of weights is asked for", f"plan for 4 bits, {conditions}",
                 plan["bytes_read_for_plan"] / 1e3, "kB")
    home = person.home
    before = allocated(home)
    peak = peak_of(person.start("pull", REPO, "--bits", "4", "-y"), home) - before
    folder = Path(plan["folder"])
    result = sum(path.stat().st_size for path in folder.iterdir())
    yield Figure("kept_of_plan", "size of the result, of the planned one", f"4 bits, {result / 1e9:.3f} GB",
                 result / plan["bytes_kept"], "")
    yield Figure("loaded_of_plan", "bytes loaded, of the planned ones", f"4 bits, {conditions}", total / plan["bytes_to_load"], "")
    yield Figure("peak_disk", "peak disk, of the largest shard and the result", f"4 bits, shard {largest / 1e9:.3f} GB",
                 peak / (largest + result), "")


def killed(hub: Hub, person: HubUser, kills: int) -> Iterator[Figure]:
    files = hub.repos[REPO].files
    total = sum(len(data) for name, data in files.items() if name.endswith(WEIGHTS))
    served = lambda: sum(count for name, count in hub.served.items() if name.endswith(WEIGHTS))  # noqa: E731
    hub.forget()
    hub.rate = 60e6  # a connection: slow enough that every kill strikes
    struck, rng = 0, random.Random()
    for goal in sorted(rng.uniform(0.02, 0.98) * total for _ in range(kills)):
        process = person.start("pull", REPO, "-y")
        while served() < goal and process.poll() is None:
            time.sleep(0.002)
        struck += process.poll() is None
        process.kill()
        process.communicate()
    hub.rate = None
    ended(person.start("pull", REPO, "-y"))
    snapshot = person.snapshot(REPO, hub.repos[REPO].commit)
    for name, data in files.items():
        with (snapshot / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").digest() != hashlib.sha256(data).digest():
                raise SystemExit(f"{name} came out wrong after {struck} kills")
    loaded_again = served() - total
    conditions = f"{total / 1e9:.2f} GB, {struck} kills at random points, every sha256 right"
    yield Figure("twice_mb", "sent twice for a kill, all connections", conditions, loaded_again / max(1, struck) / 1e6, "MB")
    yield Figure("twice_ranges", "the same, of one range", f"{transfer.RANGE_NBYTES / 1e6:.1f} MB",
                 loaded_again / max(1, struck) / transfer.RANGE_NBYTES, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--discard", action="store_true", help="print, and keep no results")
    options = parser.parse_args()
    source = random_folder(SHAPE, user_cache_path("effllm") / "benchmarks")
    figures = []
    with tempfile.TemporaryDirectory(prefix="effllm-pull-") as home, running() as hub:
        hub.add(REPO, files=files_of(source))
        person = HubUser(Path(home), hub.endpoint)
        for part in (planned_and_kept(hub, person), killed(hub, person, options.kills)):
            for figure in part:
                print(f"{figure.what}, {figure.conditions}: {figure.value:.4g} {figure.unit}", file=sys.stderr, flush=True)
                figures.append(figure)
    publish("pull-promises", "What a pull promises", __doc__.split("\n\n")[1], figures, keep=not options.discard)


if __name__ == "__main__":
    main()
