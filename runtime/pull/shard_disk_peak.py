"""Peak disk usage of a repository's shards while it is quantized during the download.

Usually one shard at a time. Checkpoints of other quantizers store a weight as several tensors (codes, scales); where the index puts
these into two shards, the earlier one stays until the later one has arrived.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...offload.shards import INDEX
from .client import Client, RemoteFile
from .repository import Repository

INDEX_LIMIT = 1 << 20  # 12,000 tensors; of a larger one it is assumed that all shards stay
PARTS = ("_blocks", "_scales")  # of tensors with all experts of a layer


def peak_shard_nbytes(repository: Repository, shards: Sequence[RemoteFile], client: Client) -> tuple[int, int]:
    """(bytes of shards on the disk at the worst moment, bytes read to know it), for weights that lie in parts."""
    index = repository.files.get(INDEX)
    if index is None or len(shards) < 2 or index.size > INDEX_LIMIT:
        return sum(shard.size for shard in shards), 0
    text = client.small_file(repository.asked, repository.commit, index, INDEX_LIMIT)
    try:
        places = json.loads(text)["weight_map"]
        return peak_held_nbytes({shard.name: shard.size for shard in shards}, places), len(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # said when it is opened
        return sum(shard.size for shard in shards), len(text)


def peak_held_nbytes(sizes: Mapping[str, int], places: Mapping[str, str]) -> int:
    """Bytes at the worst moment when shards of `sizes` come in their order and each stays until all parts of its weights are here."""
    order = {name: number for number, name in enumerate(sizes)}
    weights: dict[str, set[int]] = {}
    for tensor, shard in places.items():
        if shard in order:
            weights.setdefault(weight_key(tensor), set()).add(order[shard])
    until = dict(enumerate(range(len(sizes))))
    for numbers in weights.values():
        for number in numbers:
            until[number] = max(until[number], *numbers)
    each = list(sizes.values())
    return max((sum(each[i] for i in range(now + 1) if until[i] >= now) for now in range(len(each))), default=0)


def weight_key(tensor: str) -> str:
    """What the parts of one weight have in common: the module, and of joined experts the matrix."""
    base, beside, _ = tensor.partition(".weight.")  # parts that bear the weight's name, as bitsandbytes has them
    if beside:
        return base
    base, _, ending = tensor.rpartition(".")
    part = next((part for part in PARTS if ending.endswith(part)), "")
    return f"{base}.{ending.removesuffix(part)}" if part else base
