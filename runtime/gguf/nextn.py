"""The layer for multi-token prediction in GGUF files: a block behind the last, some of whose tensors are called nextn.

Copies of the embedding and of the head, which some files have of it, are left out: a model drafts with its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import ModelConfig
from ..mtp_tensors import EMBED_NORM, JOIN, LAST_NORM, MTP, STATE_NORM, block_name, mtp_rules

PARTS = {"nextn.eh_proj": JOIN, "nextn.enorm": EMBED_NORM, "nextn.hnorm": STATE_NORM, "nextn.shared_head_norm": LAST_NORM}


def mtp_names(name: str, own: Sequence[str] | None, config: ModelConfig) -> tuple[str, ...]:
    """The names in a checkpoint folder of what lies in a tensor of a block behind the last, which would have the names `own` in a layer of
    that number; none where nothing is read of it."""
    before, rules = f"blk.{config.num_hidden_layers}.", mtp_rules(config)
    part, _, kind = name.removeprefix(before).rpartition(".")
    if not rules or not name.startswith(before):
        return ()
    if part in PARTS:
        return (rules[MTP + PARTS[part]].name,) if kind == "weight" else ()
    names = tuple(each.replace(f"model.layers.{config.num_hidden_layers}.", block_name(config), 1) for each in own or ())
    return names if {rule.name for rule in rules.values()} >= set(names) else ()
