"""Maps MLX tensor names and layouts to those of the published model.

A few tensors are laid out differently: convolutions (last dimension), a layer's experts as one tensor, latent attention's KV
up-projection by head, activation parameters without a dimension, and the names of some families. None of that moves a value within a
row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo, damaged, shown
from .. import families

ENDINGS = "weight|scales|biases|bias"
SWITCH = re.compile(rf"(.+\.)(?:switch_mlp|experts)\.(gate_proj|up_proj|down_proj|fc1|fc2)\.({ENDINGS})")
EXPERT_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "fc1": "up", "fc2": "down"}
CONVOLUTIONS = (".conv1d.weight", ".conv.weight")
NUMBERS = (".act_fn.alpha_p", ".act_fn.alpha_n")
BY_HEADS = re.compile(r".+\.(?:embed_q|unembed_out)\.(?:weight|scales|biases)")  # `mlx_latent.py`
GRANITE = {".block_sparse_moe.router.layer.": ".block_sparse_moe.gate."}
DENSE = {f".feed_forward.{theirs}.": f".feed_forward.{own}." for theirs, own in
         (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))}
# Family -> parts of its names in these folders, and in those of who published it.
PARTS = {"granitemoe": GRANITE, "lfm2_moe": DENSE, "granitemoehybrid": {**GRANITE, ".mlp.down_proj.": ".shared_mlp.output_linear."}}


def canonicalize_mlx_names(store: TensorStore, family: str) -> None:
    """Rename and reshape what MLX lays out differently, for the family of a `model_type`. Raises CheckpointError."""
    store.tensors = {info.name: info for info in _as_published(store.tensors, family)}


def _as_published(tensors: Mapping[str, TensorInfo], family: str) -> Iterator[TensorInfo]:
    names, parts = families.get(family).NAMES, PARTS.get(family, {})
    for name, info in tensors.items():
        if name.endswith(CONVOLUTIONS) and len(info.shape) == 3 and info.shape[2] == 1:
            yield replace(info, shape=(info.shape[0], 1, info.shape[1]))
        elif name.endswith(NUMBERS) and info.shape == ():
            yield replace(info, shape=(1,))
        elif BY_HEADS.fullmatch(name) and len(info.shape) == 3:
            yield replace(info, shape=(info.shape[0] * info.shape[1], info.shape[2]))
        elif found := SWITCH.fullmatch(name):
            yield from _experts(info, *found.groups(), names)
        else:
            theirs = next((each for each in parts if each in name), None)
            yield replace(info, name=name.replace(theirs, parts[theirs])) if theirs else info


def _experts(info: TensorInfo, before: str, role: str, ending: str, names: Mapping[str, str]) -> Iterator[TensorInfo]:
    """What each expert has of a tensor of all."""
    count = info.shape[0] if info.shape else 0
    if len(info.shape) != (2 if ending == "bias" else 3) or not count or info.nbytes % count:
        damaged(info.file, f"holds {shown(info.name)} as {info.dtype} {list(info.shape)}")
    role, nbytes = EXPERT_ROLES[role], info.nbytes // count
    for expert in range(count):
        yield TensorInfo(f"{before}experts.{expert}.{names.get(role, f'{role}_proj')}.{ending}", info.dtype, info.shape[1:], info.file,
                         info.offset + expert * nbytes, nbytes)
