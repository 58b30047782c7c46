"""Tensor names of GGUF files translated to those of a checkpoint folder and back, by the tables of `architectures.py`."""

from __future__ import annotations

from collections.abc import Mapping

from ..families import base_role, expert_of
from ..ngrams import is_table
from . import latent_attention, linear_attention, nextn
from .architecture import CORRECTION, LAYER, OUTER, ROUTER, SHARE, SHARED_EXPERT, Architecture
from .qwen4 import TABLE

# Of a mixture: the matrices of all experts, and the router; older files have `ffn_gate.3` instead, a tensor for every expert.
EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
JOINT_EXPERTS = {"ffn_gate_up_exps": ("gate", "up")}  # of each expert one after the other
SINGLE_EXPERTS = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}


def own_names(name: str, found: Architecture, experts: int = 0) -> tuple[str, ...] | None:
    """The names in a checkpoint folder of what lies in a tensor, of a model with so many `experts`; None for one that no family has."""
    if name in OUTER or name in found.outer:
        return (found.outer.get(name) or OUTER[name],)
    first, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    if first == "blk" and index.isdecimal() and rest in found.whole:
        return (f"{found.layers}.{int(index)}.{found.whole[rest]}",)
    part, _, kind = rest.rpartition(".")
    if experts and found.experts is not None:
        own = _of_experts(part, experts, *found.experts)
    else:
        own = []
    own = [f"{each}.{kind}" for each in own] or [_part(each, kind, found)
                                                for each in {**found.fused_before, **found.fused}.get(part, (part,))]
    if first != "blk" or not index.isdecimal() or None in own or kind not in ("weight", "bias"):
        return None
    return tuple(f"{found.layers}.{int(index)}.{each}" for each in own)


def _part(each: str, kind: str, found: Architecture) -> str | None:
    """What a checkpoint calls a part of a tensor of a layer, with its kind where it has one; None for what no family has."""
    plain = found.layer_names.get(each) or LAYER.get(each)
    return found.whole.get(f"{each}.{kind}") or (plain if each == CORRECTION or plain is None else f"{plain}.{kind}")


def _of_experts(part: str, experts: int, place: str, names: Mapping[str, str]) -> list[str]:
    """What a tensor of experts or a router is called; empty for another."""
    if part == ROUTER:
        return [f"{place}.gate"]
    base, _, number = part.partition(".")
    before = place and f"{place}."
    if number.isdecimal() and base in SINGLE_EXPERTS and int(number) < experts:
        return [f"{before}experts.{int(number)}.{names[SINGLE_EXPERTS[base]]}"]
    kinds = JOINT_EXPERTS.get(part) or ((EXPERTS[part],) if part in EXPERTS else ())
    return [f"{before}experts.{expert}.{names[kind]}" for expert in range(experts) for kind in kinds]


# Role of a tensor of a family -> the part of its name in a file.
ROLES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "input_norm": "attn_norm", "post_norm": "ffn_norm", "q": "attn_q",
    "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "o_norm": "post_attention_norm",
    "down_norm": "post_ffw_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": ROUTER,
    "attn_gate": "attn_gate", "shared.scale": SHARE, "correction": CORRECTION, **linear_attention.ROLES, **latent_attention.ROLES,
    **nextn.ROLES,
    **{f"shared.{own.removesuffix('_proj')}": part for part, own in SHARED_EXPERT.items()},
}


def file_part(role: str, found: Architecture) -> str:
    """What a tensor of a role is called in a file, without its layer and kind. Raises KeyError for a role that files do not have."""
    if is_table(role):
        return TABLE
    plain = (role if expert_of(role) is None else base_role(role)).removesuffix("_bias")
    own = found.roles.get(role) or found.roles.get(plain) or ROLES[plain]
    return f"{own}_exps" if expert_of(role) is not None else own
