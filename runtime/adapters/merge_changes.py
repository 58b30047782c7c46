"""Changes that an adapter of any format makes to the files of a model folder: deltas to stored weights, and replaced tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import UsageError
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import TensorInfo, is_gguf, shown
from .. import families
from ..config import ModelConfig
from ..source import open_weights
from ..stores.tensor_views import TRANSPOSED_FAMILIES
from ..tensors import check_tensors
from .adapter import MLX, PEFT, STATED, Adapter, Delta, matching_names
from .adapter_targets import target_rows, transposed_weights
from .loaded_adapters import BESIDE

OUTER = ("head", "embed")  # what surrounds the layers and may be changed


@dataclass(frozen=True)
class Changes:
    """`deltas` and `whole` by names in the files; `turned`: those of them that lie inputs before outputs there. `store`: the adapter's,
    which whoever has this closes; `stated`: what its config says."""

    deltas: Mapping[str, Delta]
    whole: Mapping[str, TensorInfo]
    turned: frozenset[str]
    store: TensorStore
    stated: Mapping[str, object]


def changes(adapter: Path, source: Path, config: ModelConfig, held: Mapping[str, TensorInfo]) -> Changes:
    """Of an adapter, a folder or a GGUF file, for the model in the folder `source`, whose files hold these tensors. Raises CheckpointError,
    UsageError."""
    if not os.path.exists(adapter):
        raise UsageError(f"--lora: {adapter} does not exist", f"a folder with {STATED} and {PEFT} or {MLX}, or a GGUF file")
    turned = frozenset(name for whole in transposed_weights(config) for name in matching_names(held, whole))
    stored = {name: info.shape for name, info in held.items()}
    shapes = stored | {name: stored[name][::-1] for name in turned}
    if is_gguf(adapter):
        return _of_file(adapter, source, config, shapes, turned)
    embed = families.get(config.family).outer_tensors(config)["embed"]
    tables = {name.removesuffix(".weight").rpartition(".")[2] for name in (embed.name, *embed.also)}
    own = Adapter.open(adapter, config.family in TRANSPOSED_FAMILIES, tables)
    try:
        if config.tie_word_embeddings:
            own.tie()
        return Changes(dict(own.deltas(shapes)), own.replaced(stored), turned, own.store, own.stated)
    except BaseException:
        own.store.close()
        raise


def _of_file(adapter: Path, source: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], turned: frozenset[str]) -> Changes:
    """Of a GGUF file, which says it of the matrices as a model computes with them."""
    from ..gguf.adapter import gguf_deltas, open_adapter_file

    store, _ = open_weights(source, low_bit=False)
    with store:
        tensors = check_tensors(config, store)
    usual = {name: (shape, own[0]) for name, (shape, own) in target_rows(config, tensors, of_file=True).items() if len(own) == 1}
    around = families.get(config.family).outer_tensors(config)
    outer = {name: role for role in OUTER if role in around for name in (around[role].name, *around[role].also)}
    rows = {name: shape for name, (shape, _) in usual.items()} | {name: around[role].shape for name, role in outer.items()}
    found = {}
    for name, delta in gguf_deltas(adapter, config, rows):
        found[usual[name][1].key if name in usual else ("outer", outer[name])] = name, delta
    if config.tie_word_embeddings and ("outer", "embed") in found:
        raise CheckpointError(f"{adapter} changes the embeddings but not the tied output head in the same way",
                              "merge it with the program that trained it, which unties the head")
    made: dict[str, Delta] = {}
    lacking = set(found)
    for name, (shape, own) in target_rows(config, tensors).items():
        parts = [(place, found[place.key][1]) for place in own if place.key in found]
        alike = matching_names(shapes, name) if parts else []
        if len(alike) != 1 or tuple(shapes[alike[0]]) != tuple(shape):
            continue
        b = [place.of_weight(np.float32(delta.scale) * delta.b, shape[0]) for place, delta in parts]
        made[alike[0]] = Delta(np.concatenate([delta.a for _, delta in parts]), np.concatenate(b, 1), 1.0, None)
        lacking -= {place.key for place, _ in parts}
    for key in [key for key in lacking if key[0] == "outer"]:
        name, delta = found[key]
        held = {each for own in (name, around[key[1]].name, *around[key[1]].also) for each in matching_names(shapes, own)}
        if len(held) == 1:
            made[held.pop()] = delta
            lacking.remove(key)
    if lacking:
        first = min(lacking, key=str)
        raise CheckpointError(f"{adapter} changes {shown(found[first][0])}, which {source} stores in another layout",
                              "effllm run --lora applies it at run time" if first[1] in BESIDE
                              else "merge it with the program that trained it")
    return Changes(made, {}, turned, open_adapter_file(adapter), {})
