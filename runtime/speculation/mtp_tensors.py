"""The layer that a checkpoint has for predicting the next token but one: what its tensors are called, by family.

Such a layer (DeepSeek V3, arXiv:2412.19437, section 2.2) is one more block of the model's kind, behind a matrix that joins what the model
made of a token with the embedding of the one that follows it. Its roles stand among those outside the layers, behind MTP: they are read
where a run drafts by it, and go along when weights are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import families
from ..families import TensorRule

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ..config import ModelConfig

MTP = "mtp."  # before the roles of the layer
JOIN, EMBED_NORM, STATE_NORM, LAST_NORM = "join", "next_norm", "seen_norm", "last_norm"


@dataclass(frozen=True)
class MtpNames:
    """Where a family keeps the layer: the prefix of what is the layer's own, with the number of layers in it, and of its block; names of
    the matrix that joins and of the norms of embeddings, of states and before the head, "" where that is the model's. `dense`: its block
    is one without experts, in a mixture too. `state_first`: the matrix reads the state before the embedding."""

    prefix: str
    block: str
    join: str
    norms: tuple[str, str, str]
    dense: bool = False
    state_first: bool = False


APART = MtpNames("mtp.", "mtp.layers.0.", "fc", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
BEHIND = MtpNames("model.layers.{}.", "model.layers.{}.", "eh_proj", ("enorm", "hnorm", "shared_head.norm"))  # the number behind the last
NAMED = replace(BEHIND, norms=("enorm", "hnorm", "final_layernorm"))
MIMO = MtpNames("model.mtp_layers.0.", "model.mtp_layers.0.", "input_proj", ("token_layernorm", "hidden_layernorm", "final_layernorm"),
                state_first=True)
ERNIE = MtpNames("model.", "model.mtp_block.0.", "mtp_linear_proj.0", ("mtp_emb_norm.0", "mtp_hidden_norm.0", ""), dense=True)
PLACES: Mapping[str, MtpNames] = {"qwen3_5_text": APART, "qwen3_5_moe_text": APART, "qwen3_next": APART,
                                  "deepseek_v3": BEHIND, "deepseek_v32": BEHIND, "ernie4_5_moe": ERNIE, "glm4_moe": BEHIND,
                                  "glm4_moe_lite": BEHIND, "glm_moe_dsa": BEHIND, "bailing_moe_v2": NAMED, "hy_v3": NAMED, "mimo": MIMO}


def like(config: ModelConfig) -> int:
    """The layer of the model whose kind the layer is: the last one that has keys and values, of those without experts where it has none,
    and of those that choose for themselves what they see where some do; -1 where there is none such."""
    dense, chosen = PLACES[config.family].dense and config.mixture is not None, config.indexed
    return next((layer for layer in reversed(config.attention_layers) if (not dense or layer not in config.mixture.layers)
                 and (chosen is None or chosen.sources[layer] in (None, layer))), -1)


def block_name(config: ModelConfig) -> str:
    """What the names of the layer's block begin with, of a family in PLACES."""
    return PLACES[config.family].block.format(config.num_hidden_layers)


def mtp_rules(config: ModelConfig) -> dict[str, TensorRule]:
    """The layer's tensors by role, none for a model without one, or of a family whose layer is not run."""
    place = PLACES.get(config.family)
    if place is None or not config.mtp_layers or (own := like(config)) < 0:
        return {}
    hidden = config.hidden_size
    prefix, block = place.prefix.format(config.num_hidden_layers), block_name(config)
    rules = {JOIN: TensorRule(f"{prefix}{place.join}.weight", (hidden, 2 * hidden))}
    for role, name in zip((EMBED_NORM, STATE_NORM, LAST_NORM), place.norms, strict=True):
        if name:
            rules[role] = TensorRule(f"{prefix}{name}.weight", (hidden,))
    for role, rule in families.get(config.family).layer_tensors(config, own).items():
        rules[role] = _elsewhere(rule, f"model.layers.{own}.", block)
    return {MTP + role: rule for role, rule in rules.items()}


def _elsewhere(rule: TensorRule, layer: str, block: str) -> TensorRule:
    """The rule of a tensor whose names begin with `layer`, for one of the same kind in `block`."""
    name, *also = (each.replace(layer, block, 1) for each in (rule.name, *rule.also))
    whole = None if rule.part_of is None else (rule.part_of[0].replace(layer, block, 1), *rule.part_of[1:])
    return replace(rule, name=name, also=tuple(also), part_of=whole)


def held_rules(config: ModelConfig, store: TensorStore) -> dict[str, TensorRule]:
    """`mtp_rules` where a store holds all of these tensors, none where one is missing: publishers and tools leave them out."""
    rules = mtp_rules(config)
    names = ({rule.name, *rule.also, *(rule.part_of or ())[:1]} for rule in rules.values())
    return {} if any(each.isdisjoint(store.tensors) for each in names) else rules
