"""Peak disk usage of a repository's shards while it is quantized during the download.

Usually that is one shard. Checkpoints of other quantizers store a weight as several tensors (codes, scales); if the index puts these into
two shards, the earlier one stays until the later one has arrived.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...offload.shards import INDEX
from .client import Client, RemoteFile
from .repository import Repository

INDEX_LIMIT = 1 << 20  # bytes, about 12,000 tensors; with a larger index all shards are assumed to stay
PART_SUFFIXES = ("_blocks", "_scales")  # of tensors with all experts of a layer


def peak_shard_nbytes(repository: Repository, shards: Sequence[RemoteFile], client: Client) -> tuple[int, int]:
    """(peak bytes of shards on the disk, bytes downloaded to know it), for weights in several parts."""
    index = repository.files.get(INDEX)
    if index is None or len(shards) < 2 or index.size > INDEX_LIMIT:
        return sum(shard.size for shard in shards), 0
    text = client.small_file(repository.requested_name, repository.commit, index, INDEX_LIMIT)
    try:
        weight_map = json.loads(text)["weight_map"]
        return peak_held_nbytes({shard.name: shard.size for shard in shards}, weight_map), len(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # an error when it is opened
        return sum(shard.size for shard in shards), len(text)


def peak_held_nbytes(sizes: Mapping[str, int], weight_map: Mapping[str, str]) -> int:
    """Peak bytes if shards arrive in the order of `sizes` (name -> bytes) and stay until all parts of their weights are here.
    `weight_map`: tensor -> shard."""
    order = {name: number for number, name in enumerate(sizes)}
    weights: dict[str, set[int]] = {}
    for tensor, shard in weight_map.items():
        if shard in order:
            weights.setdefault(weight_key(tensor), set()).add(order[shard])
    needed_until = dict(enumerate(range(len(sizes))))
    for numbers in weights.values():
        for number in numbers:
            needed_until[number] = max(needed_until[number], *numbers)
    nbytes = list(sizes.values())
    return max((sum(nbytes[i] for i in range(now + 1) if needed_until[i] >= now) for now in range(len(nbytes))), default=0)


def weight_key(tensor: str) -> str:
    """The common part of the tensor names of one weight: the module, and of joined experts the matrix."""
    base, separator, _ = tensor.partition(".weight.")  # bitsandbytes names parts after the weight
    if separator:
        return base
    base, _, name = tensor.rpartition(".")
    suffix = next((suffix for suffix in PART_SUFFIXES if name.endswith(suffix)), "")
    return f"{base}.{name.removesuffix(suffix)}" if suffix else base
