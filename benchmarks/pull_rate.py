"""How fast a large file comes over the loopback: `effllm pull` beside huggingface_hub, from the same server in a process of its own.

Rounds alternate, the better half of each side counts. effllm checks the content while it writes, by sha256 or, where the processor is slow
at that, by the hash of Xet that hubs name too; the library checks the length alone, so it is measured once more with its file hashed
afterwards, and effllm with sha256 in any case and without a check: what each costs beside the transfer. Transfers by chunks as Xet makes
them are off on all sides: the loopback has no such storage.

    python benchmarks/pull_rate.py [--nbytes 1000000000] [--rounds 5] [--discard]
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import hub_server
import numpy as np
from hub_server import Hub, running
from huggingface_hub import snapshot_download

from effllm.offload import running_hash
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.download import download
from effllm.runtime.pull.repository import describe
from report import Figure, publish

REPO, WEIGHTS = "org/large", "model.safetensors"


def serve(nbytes: int) -> None:
    """Until stdin closes."""
    hub_server.CHUNK_NBYTES = 1 << 20
    content = np.random.default_rng(0).bytes(nbytes)
    hub = Hub(xet={WEIGHTS: hub_server.xet_hash(content)})
    hub.add(REPO, files={"config.json": b"{}", WEIGHTS: content})
    with running(hub):
        sys.stdout.write(f"{hub.endpoint}\n")
        sys.stdout.flush()
        sys.stdin.read()


def ours(endpoint: str, cache: Path) -> None:
    env = {"HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache)}
    client = Client(env)
    repository = describe(client, REPO, "main")
    *_, folder = download(repository, list(repository.files.values()), client, env)
    assert (folder / WEIGHTS).exists()


def ours_sha256(endpoint: str, cache: Path) -> None:
    with replaced("can_xet", lambda: False):
        ours(endpoint, cache)


def ours_unchecked(endpoint: str, cache: Path) -> None:
    with replaced("new_hash", lambda digest, size: None):
        ours_sha256(endpoint, cache)


@contextmanager
def replaced(name: str, other: Callable) -> Iterator[None]:
    original = getattr(running_hash, name)
    setattr(running_hash, name, other)
    try:
        yield
    finally:
        setattr(running_hash, name, original)


def theirs(endpoint: str, cache: Path) -> None:
    assert (Path(snapshot_download(REPO, cache_dir=cache, endpoint=endpoint)) / WEIGHTS).exists()


def theirs_checked(endpoint: str, cache: Path) -> None:
    with (Path(snapshot_download(REPO, cache_dir=cache, endpoint=endpoint)) / WEIGHTS).open("rb") as file:
        hashlib.file_digest(file, "sha256")


def hash_rate() -> float:
    """Bytes a second of sha256 alone, from memory."""
    block, times = bytes(1 << 26), []
    for _ in range(5):
        began = time.perf_counter()
        hashlib.sha256(block).digest()
        times.append(time.perf_counter() - began)
    return len(block) / min(times)


def seconds(pull: Callable[[str, Path], None], endpoint: str) -> float:
    cache = Path(tempfile.mkdtemp(prefix="effllm-pull-"))
    try:
        began = time.perf_counter()
        pull(endpoint, cache)
        return time.perf_counter() - began
    finally:
        shutil.rmtree(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--discard", action="store_true", help="print, and keep no results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.nbytes)
        return
    command = [sys.executable, __file__, "--serve", "--nbytes", str(options.nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        endpoint = server.stdout.readline().strip()
        took: dict[Callable, list[float]] = {ours: [], ours_sha256: [], ours_unchecked: [], theirs: [], theirs_checked: []}
        for _ in range(options.rounds):
            for pull in took:
                took[pull].append(seconds(pull, endpoint))
        server.stdin.close()
    rates = {pull: options.nbytes / 1e9 / fmean(sorted(times)[: (len(times) + 1) // 2]) for pull, times in took.items()}
    size = f"{options.nbytes / 1e9:g} GB over the loopback, better half of {options.rounds} rounds"
    hash_name = "Xet" if running_hash.can_xet() and running_hash.sha256_is_slow() else "sha256"
    publish("pull-rate", "Download rate", __doc__.split("\n\n")[1], [
        Figure("effllm_gbps", f"effllm pull, checked by {hash_name}", size, rates[ours], "GB/s"),
        Figure("effllm_sha256_gbps", "effllm pull, checked by sha256", size, rates[ours_sha256], "GB/s"),
        Figure("effllm_unchecked_gbps", "effllm pull without a check", size, rates[ours_unchecked], "GB/s"),
        Figure("huggingface_hub_gbps", "huggingface_hub, length checked", size, rates[theirs], "GB/s"),
        Figure("huggingface_hub_checked_gbps", "huggingface_hub, then sha256", size, rates[theirs_checked], "GB/s"),
        Figure("sha256_gbps", "sha256 alone", "one core, from memory", hash_rate() / 1e9, "GB/s"),
        Figure("ratio", "effllm / huggingface_hub", "same rounds", rates[ours] / rates[theirs], "x"),
        Figure("ratio_checked", "effllm / huggingface_hub with its sha256", "same rounds", rates[ours] / rates[theirs_checked], "x"),
    ], keep=not options.discard)


if __name__ == "__main__":
    main()
