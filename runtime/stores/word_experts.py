"""Folders of ERNIE 4.5 VL, whose mixtures have two sets of experts, some that words visit and as many for what pictures become: those of
words alone, as ERNIE 4.5's mixtures have them.

Experts are numbered through, those of words first, and so are the two rows of corrections. A router's matrix lies inputs before outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ...offload.checkpoint import TensorStore
from ...offload.header import TensorInfo, damaged, shown
from ..config_reader import Keys
from ..families.mixtral import MOST_EXPERTS
from .parted_rows import Columns, PartedStore

EXPERT = re.compile(r".+\.mlp\.experts\.(\d+)\.\w+_proj\..+")
ROUTER, OTHER_ROUTER = ".mlp.gate.weight", ".mlp.gate.weight_1"
CORRECTION = ".mlp.moe_statics.e_score_correction_bias"


def words_alone(store: TensorStore, raw: Mapping[str, object]) -> TensorStore:
    """The store with the experts of words alone; `raw` is the config of the text part. Raises CheckpointError."""
    hidden, experts = Keys(raw).integer("hidden_size", 2560), Keys(raw).integer("moe_num_experts", 64, high=MOST_EXPERTS)
    kept: dict[str, TensorInfo] = {}
    turned = {}
    for name, info in store.tensors.items():
        found = EXPERT.fullmatch(name)
        if name.endswith(OTHER_ROUTER) or found is not None and int(found[1]) >= experts:
            continue
        if name.endswith(ROUTER) and info.shape == (hidden, experts):
            turned[name] = (experts, hidden), Columns(info, 0)
        if name.endswith(CORRECTION):
            if len(info.shape) != 2 or info.shape[0] not in (1, 2) or info.nbytes % info.shape[0]:
                damaged(info.file, f"holds {shown(name)} as {info.dtype} {list(info.shape)}")
            info = replace(info, shape=(1, info.shape[1]), nbytes=info.nbytes // info.shape[0])
        kept[name] = info
    store.tensors = kept
    return PartedStore(store, turned) if turned else store
