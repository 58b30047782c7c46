"""Tied embeddings: the head of a model whose config ties it to the embedding. If a checkpoint stores a head that differs from the
embedding, the head is used; transformers ties the two only if they are equal. A byte-identical copy is removed from the store on opening,
so that from then on the store's contents decide, for a run as for conversions.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo, shown
from .. import families
from ..config import ModelConfig, read_config
from ..families import TensorRule

PIECE_NBYTES = 4 << 20
HEADS = ("lm_head.weight", "decoder.weight")  # name endings of tied heads
_known: dict[tuple[object, ...], bool] = {}  # for unchanged files: a command opens a model more than once


def outer_rules(config: ModelConfig, held: Container[str]) -> dict[str, TensorRule]:
    """The tensors outside the layers, given what a store holds: for a tied model, a head if it is stored beside the embedding; if it is
    stored instead of it (by writers that keep shared tensors under their first name), the embedding under that name."""
    rules = families.get(config.family).outer_tensors(replace(config, tie_word_embeddings=False))
    if not config.tie_word_embeddings:
        return rules
    head = rules.pop("head")
    if not _is_held(head, held):
        return rules
    if _is_held(rules["embed"], held):
        return rules | {"head": head}
    embed = rules["embed"]
    return rules | {"embed": replace(embed, also=(*embed.also, head.name, *head.also))}


def drop_tied_copy(store: TensorStore) -> None:
    """Remove a tied model's head from a store if it equals the embedding; else record that there is one."""
    if not any(name.endswith(HEADS) for name in store.tensors):
        return
    config = read_config(store.folder)
    rules = outer_rules(config, store.tensors)
    if not config.tie_word_embeddings or "head" not in rules:
        return
    head, embed = (_info(rules[role], store.tensors) for role in ("head", "embed"))
    if not _is_copy(store, head, embed):
        said = f"config.json ties the head to the embedding, but {shown(head.name)} is another matrix: it is used"
        store.notices = (*store.notices, said)
        return
    del store.tensors[head.name]
    store.nbytes -= head.nbytes


def drop_tied_copy_parts(store: TensorStore, config: ModelConfig) -> None:
    """The same for an MLX-quantized head before it is repacked: all its parts equal the embedding's."""
    rules = outer_rules(config, store.tensors)
    if not config.tie_word_embeddings or "head" not in rules:
        return
    head, embed = (_info(rules[role], store.tensors).name.removesuffix("weight") for role in ("head", "embed"))
    endings = [name.removeprefix(head) for name in store.tensors if name.startswith(head)]
    if len(endings) > 1 and all(f"{embed}{ending}" in store.tensors and _is_copy(
            store, store.tensors[f"{head}{ending}"], store.tensors[f"{embed}{ending}"]) for ending in endings):
        for ending in endings:
            del store.tensors[f"{head}{ending}"]


def _is_copy(store: TensorStore, head: TensorInfo, embed: TensorInfo) -> bool:
    """`_same`, cached while the files are unchanged."""
    stamps = [(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) for status in (
        os.fstat(store.descriptor(info.file)) for info in (head, embed))]
    key = (*stamps, head, embed)
    if key not in _known:
        _known[key] = _same(store, head, embed)
    return _known[key]


def _same(store: TensorStore, one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tables hold the same bytes, comparing a few megabytes at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not one.nbytes:
        return False
    step = max(1, PIECE_NBYTES // (one.nbytes // one.shape[0]))
    return all(np.array_equal(*(store.read(info, begin, min(begin + step, one.shape[0])) for info in (one, other)))
               for begin in range(0, one.shape[0], step))


def _is_held(rule: TensorRule, held: Container[str]) -> bool:
    return any(name in held for name in (rule.name, *rule.also))


def _info(rule: TensorRule, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    return next(tensors[name] for name in (rule.name, *rule.also) if name in tensors)
