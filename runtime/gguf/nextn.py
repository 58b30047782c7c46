"""Multi-token prediction (MTP) layers in GGUF files: a block after the last layer, with some tensors named nextn.

Copies of embedding and head, which some files have, are skipped: drafts use the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...offload.gguf_header import Value
from ..config import ModelConfig
from ..speculation.mtp_tensors import EMBED_NORM, JOIN, LAST_NORM, MTP, STATE_NORM, block_name, mtp_rules

if TYPE_CHECKING:
    from ..tensors import ModelTensor

IGNORED_FAMILIES = ("deepseek_v4", "glm5_next_text", "mimo_v2_flash")  # families whose MTP layer is never loaded
EXPORTED_FAMILIES = ("glm4_moe", "qwen3_5_moe_text", "qwen3_5_text")  # families whose MTP layer is exported
PARTS = {"nextn.eh_proj": JOIN, "nextn.enorm": EMBED_NORM, "nextn.hnorm": STATE_NORM, "nextn.shared_head_norm": LAST_NORM}

ROLES = {role: part for part, role in PARTS.items()}


def split_mtp_layer(outer: Mapping[str, ModelTensor]) -> tuple[dict[str, ModelTensor], dict[str, ModelTensor]]:
    """Split the tensors outside the layers into (others, those of the MTP layer by role)."""
    mtp = {role.removeprefix(MTP): tensor for role, tensor in outer.items() if role.startswith(MTP)}
    return {role: tensor for role, tensor in outer.items() if not role.startswith(MTP)}, mtp


def export_keys(arch: str, config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of a file with an MTP layer, which the block count includes."""
    return {f"{arch}.block_count": config.num_hidden_layers + 1, f"{arch}.nextn_predict_layers": 1}


def is_ignored_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to an MTP layer that is not loaded."""
    first, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return config.family in IGNORED_FAMILIES and first == "blk" and layer.isdecimal() and int(layer) >= config.num_hidden_layers


def mtp_names(name: str, layer_names: Sequence[str] | None, config: ModelConfig) -> tuple[str, ...]:
    """Checkpoint names of the tensors in a tensor of the MTP block; empty if it is not read.

    layer_names: the names it would have in a regular layer of that index.
    """
    prefix, rules = f"blk.{config.num_hidden_layers}.", mtp_rules(config)
    part, _, kind = name.removeprefix(prefix).rpartition(".")
    if not rules or not name.startswith(prefix):
        return ()
    if part in PARTS:
        rule = rules.get(MTP + PARTS[part])
        return () if rule is None or kind != "weight" else (rule.name,)
    names = tuple(each.replace(f"model.layers.{config.num_hidden_layers}.", block_name(config), 1) for each in layer_names or ())
    return names if {rule.name for rule in rules.values()} >= set(names) else ()
