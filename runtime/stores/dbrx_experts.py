"""DBRX checkpoints, which stack all gates of a layer's experts in one matrix, all ups and all downs in others, expert after expert: each
expert's matrices by themselves.

Gates and ups are byte ranges of the file. Downs are stored transposed, as in `transposed_experts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import CheckpointError, TensorInfo, damaged, shown
from ..config_reader import Keys
from ..families.mixtral import MAX_EXPERTS
from .transposed_experts import LastExpert, TransposedExpert, TransposedExpertStore

JOINT = re.compile(r"(.+\.ffn\.experts\.)mlp\.(w1|v1|w2)")
DOWN = "w2"


def with_dbrx_experts(store: TensorStore, raw: Mapping[str, object]) -> TensorStore:
    """The store with such experts one by one; `raw` is the config. Raises CheckpointError, also for such experts in a checkpoint that
    another tool has quantized: scales of codes that lie so are not read."""
    joint = [(name, found) for name in store.tensors if (found := JOINT.fullmatch(name))]
    if not joint:
        return store
    if raw.get("quantization_config") is not None:
        raise CheckpointError(f"{store.folder} holds {shown(joint[0][0])}, the experts of a layer in one tensor, beside quantized weights",
                              "use the original 16-bit checkpoint")
    section = Keys(Keys(raw).section("ffn_config") or {}, "config.json: ffn_config")
    width, last = section.integer("ffn_hidden_size", 3584, high=2**22), LastExpert()
    parts, ranges = {}, {}
    for name, found in joint:
        info = store.tensors[name]
        experts = info.shape[0] // width
        if len(info.shape) != 2 or experts * width != info.shape[0] or not 0 < experts <= MAX_EXPERTS or info.nbytes % prod(info.shape):
            damaged(info.file, f"holds {shown(name)} as {info.dtype} {list(info.shape)}")
        nbytes, cube = info.nbytes // experts, replace(info, shape=(experts, width, info.shape[1]))
        for expert in range(experts):
            own = f"{found[1]}{expert}.{found[2]}.weight"
            if found[2] == DOWN:
                parts[own] = (info.shape[1], width), TransposedExpert(cube, expert, 0, last)
            else:
                ranges[own] = TensorInfo(own, info.dtype, (width, info.shape[1]), info.file, info.offset + expert * nbytes, nbytes)
    kept = {name: info for name, info in store.tensors.items() if (found := JOINT.fullmatch(name)) is None or found[2] == DOWN}
    store.tensors = kept | ranges
    return TransposedExpertStore(store, parts) if parts else store
