"""Names of the multi-token-prediction layer's tensors, by family.

Such a layer (DeepSeek V3, arXiv:2412.19437, section 2.2) is one more block of the model's kind, after a matrix that joins a token's hidden
state with the next token's embedding. Its roles are among those outside the layers, prefixed by MTP: they are read where a run drafts with
it, and quantized with the rest.
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
    """Where a family stores the layer: name prefixes of its own tensors and of its block, with the layer's number; names of the joining
    matrix and of the norms of embeddings, of states and before the head, "" where that is the model's. `dense`: its block has no
    experts, also in a MoE model. `state_first`: the matrix takes the state before the embedding."""

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
    """The layer of the model that the MTP block resembles: the last one with keys and values, without experts where the block has none,
    and with an indexer of its own where some have one; -1 if there is none."""
    dense, chosen = PLACES[config.family].dense and config.moe is not None, config.indexer
    return next((layer for layer in reversed(config.attention_layers) if (not dense or layer not in config.moe.layers)
                 and (chosen is None or chosen.source_layers[layer] in (None, layer))), -1)


def block_name(config: ModelConfig) -> str:
    """The name prefix of the MTP block, for a family in PLACES."""
    return PLACES[config.family].block.format(config.num_hidden_layers)


def mtp_rules(config: ModelConfig) -> dict[str, TensorRule]:
    """The layer's tensors by role, empty for a model without one, or of an unsupported family."""
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
    """The rule of a tensor of `layer`, moved to `block`."""
    name, *also = (each.replace(layer, block, 1) for each in (rule.name, *rule.also))
    whole = None if rule.part_of is None else (rule.part_of[0].replace(layer, block, 1), *rule.part_of[1:])
    return replace(rule, name=name, also=tuple(also), part_of=whole)


def held_rules(config: ModelConfig, store: TensorStore) -> dict[str, TensorRule]:
    """`mtp_rules` if the store has all of these tensors, empty otherwise: publishers and tools often drop them."""
    rules = mtp_rules(config)
    names = ({rule.name, *rule.also, *(rule.part_of or ())[:1]} for rule in rules.values())
    return {} if any(each.isdisjoint(store.tensors) for each in names) else rules
