"""Names of the multi-token-prediction layer's tensors, by family.

Such a layer (DeepSeek V3, arXiv:2412.19437, section 2.2) is one more block of the model's kind, after a matrix that joins a token's hidden
state with the next token's embedding. Its roles are among those outside the layers, with the prefix MTP: they are read if a run drafts with
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

MTP = "mtp."  # prefix of the layer's roles
JOIN, EMBED_NORM, STATE_NORM, LAST_NORM = "join", "next_norm", "seen_norm", "last_norm"


@dataclass(frozen=True)
class MtpNames:
    """Where a family stores the layer. "{}" in a prefix is the number of the model's layers."""

    prefix: str  # of the tensors outside the block
    block: str  # prefix of the block's tensors
    join: str  # the joining matrix
    norms: tuple[str, str, str]  # of embeddings, of states, and before the head; "" for the model's own
    dense: bool = False  # the block has no experts, also in an MoE model
    state_first: bool = False  # the joining matrix takes the state before the embedding


QWEN = MtpNames("mtp.", "mtp.layers.0.", "fc", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
DEEPSEEK = MtpNames("model.layers.{}.", "model.layers.{}.", "eh_proj", ("enorm", "hnorm", "shared_head.norm"))  # after the last layer
BAILING = replace(DEEPSEEK, norms=("enorm", "hnorm", "final_layernorm"))
MIMO = MtpNames("model.mtp_layers.0.", "model.mtp_layers.0.", "input_proj", ("token_layernorm", "hidden_layernorm", "final_layernorm"),
                state_first=True)
ERNIE = MtpNames("model.", "model.mtp_block.0.", "mtp_linear_proj.0", ("mtp_emb_norm.0", "mtp_hidden_norm.0", ""), dense=True)
MTP_NAMES: Mapping[str, MtpNames] = {
    "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN, "qwen3_next": QWEN, "deepseek_v3": DEEPSEEK, "deepseek_v32": DEEPSEEK,
    "ernie4_5_moe": ERNIE, "glm4_moe": DEEPSEEK, "glm4_moe_lite": DEEPSEEK, "glm_moe_dsa": DEEPSEEK, "bailing_moe_v2": BAILING,
    "hy_v3": BAILING, "mimo": MIMO}


def mtp_model_layer(config: ModelConfig) -> int:
    """The layer of the model that the MTP block resembles: the last attention layer; without experts if the block has none, with an
    indexer of its own if some have one. -1 if there is none."""
    dense, indexed = MTP_NAMES[config.family].dense and config.moe is not None, config.indexer
    return next((layer for layer in reversed(config.attention_layers) if (not dense or layer not in config.moe.layers)
                 and (indexed is None or indexed.source_layers[layer] in (None, layer))), -1)


def block_name(config: ModelConfig) -> str:
    """The name prefix of the MTP block, for a family in MTP_NAMES."""
    return MTP_NAMES[config.family].block.format(config.num_hidden_layers)


def mtp_rules(config: ModelConfig) -> dict[str, TensorRule]:
    """The layer's tensors by role, empty for a model without one, or of an unsupported family."""
    names = MTP_NAMES.get(config.family)
    if names is None or not config.mtp_layers or (model_layer := mtp_model_layer(config)) < 0:
        return {}
    hidden = config.hidden_size
    prefix, block = names.prefix.format(config.num_hidden_layers), block_name(config)
    rules = {JOIN: TensorRule(f"{prefix}{names.join}.weight", (hidden, 2 * hidden))}
    for role, name in zip((EMBED_NORM, STATE_NORM, LAST_NORM), names.norms, strict=True):
        if name:
            rules[role] = TensorRule(f"{prefix}{name}.weight", (hidden,))
    for role, rule in families.get(config.family).layer_tensors(config, model_layer).items():
        rules[role] = _with_prefix(rule, f"model.layers.{model_layer}.", block)
    return {MTP + role: rule for role, rule in rules.items()}


def _with_prefix(rule: TensorRule, old: str, new: str) -> TensorRule:
    """The rule of a tensor with another name prefix."""
    name, *also = (alias.replace(old, new, 1) for alias in (rule.name, *rule.also))
    part_of = None if rule.part_of is None else (rule.part_of[0].replace(old, new, 1), *rule.part_of[1:])
    return replace(rule, name=name, also=tuple(also), part_of=part_of)


def stored_mtp_rules(config: ModelConfig, store: TensorStore) -> dict[str, TensorRule]:
    """`mtp_rules` if the store has all of these tensors, empty otherwise: publishers and tools often drop them."""
    rules = mtp_rules(config)
    names = ({rule.name, *rule.also, *(rule.part_of or ())[:1]} for rule in rules.values())
    return {} if any(aliases.isdisjoint(store.tensors) for aliases in names) else rules
