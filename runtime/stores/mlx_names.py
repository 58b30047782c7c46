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
FUSED_EXPERTS = re.compile(rf"(.+\.)(?:switch_mlp|experts)\.(gate_proj|up_proj|down_proj|fc1|fc2)\.({ENDINGS})")
EXPERT_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "fc1": "up", "fc2": "down"}
CONVOLUTIONS = (".conv1d.weight", ".conv.weight")
SCALARS = (".act_fn.alpha_p", ".act_fn.alpha_n")
PER_HEAD = re.compile(r".+\.(?:embed_q|unembed_out)\.(?:weight|scales|biases)")  # `mlx_latent.py`
GRANITE = {".block_sparse_moe.router.layer.": ".block_sparse_moe.gate."}
LFM2_DENSE = {f".feed_forward.{mlx_name}.": f".feed_forward.{name}."
              for mlx_name, name in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))}
# Family -> parts of names in MLX folders -> those of the published model.
RENAMED_PARTS = {"granitemoe": GRANITE, "lfm2_moe": LFM2_DENSE,
                 "granitemoehybrid": {**GRANITE, ".mlp.down_proj.": ".shared_mlp.output_linear."}}


def canonicalize_mlx_names(store: TensorStore, family: str) -> None:
    """Rename and reshape what MLX lays out differently, for the family of a `model_type`. Raises CheckpointError."""
    store.tensors = {info.name: info for info in _published(store.tensors, family)}


def _published(tensors: Mapping[str, TensorInfo], family: str) -> Iterator[TensorInfo]:
    names, renamed_parts = families.get(family).NAMES, RENAMED_PARTS.get(family, {})
    for name, info in tensors.items():
        if name.endswith(CONVOLUTIONS) and len(info.shape) == 3 and info.shape[2] == 1:
            yield replace(info, shape=(info.shape[0], 1, info.shape[1]))
        elif name.endswith(SCALARS) and info.shape == ():
            yield replace(info, shape=(1,))
        elif PER_HEAD.fullmatch(name) and len(info.shape) == 3:
            yield replace(info, shape=(info.shape[0] * info.shape[1], info.shape[2]))
        elif match := FUSED_EXPERTS.fullmatch(name):
            yield from _split_experts(info, *match.groups(), names)
        else:
            mlx_part = next((each for each in renamed_parts if each in name), None)
            yield replace(info, name=name.replace(mlx_part, renamed_parts[mlx_part])) if mlx_part else info


def _split_experts(info: TensorInfo, prefix: str, projection: str, suffix: str, names: Mapping[str, str]) -> Iterator[TensorInfo]:
    """The slice of each expert of a fused tensor."""
    count = info.shape[0] if info.shape else 0
    if len(info.shape) != (2 if suffix == "bias" else 3) or not count or info.nbytes % count:
        damaged(info.file, f"holds {shown(info.name)} as {info.dtype} {list(info.shape)}")
    projection, nbytes = EXPERT_ROLES[projection], info.nbytes // count
    for expert in range(count):
        name = f"{prefix}experts.{expert}.{names.get(projection, f'{projection}_proj')}.{suffix}"
        yield TensorInfo(name, info.dtype, info.shape[1:], info.file, info.offset + expert * nbytes, nbytes)
