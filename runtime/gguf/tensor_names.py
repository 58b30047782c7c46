"""Tensor names of GGUF files translated to those of a checkpoint folder and back, by the tables of `architectures.py`."""

from __future__ import annotations

from collections.abc import Mapping

from ..families import base_role, expert_of
from ..ngrams import is_table
from . import latent_attention, linear_attention, nextn
from .architecture import LAYER_NAMES, OUTER_NAMES, ROUTER, SCORE_CORRECTION, SHARED_EXPERT, SHARED_EXPERT_GATE, Architecture
from .qwen4 import NGRAM_TENSOR

# Of MoE layers: the matrices of all experts. Older files have a tensor for every expert, `ffn_gate.3`.
EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
JOINT_EXPERTS = {"ffn_gate_up_exps": ("gate", "up")}  # of each expert, one after the other
SINGLE_EXPERTS = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}


def checkpoint_names(name: str, architecture: Architecture, experts: int = 0) -> tuple[str, ...] | None:
    """The checkpoint's names of the tensors in a tensor of the file, for a model of so many `experts`; None for an unknown one."""
    if name in OUTER_NAMES or name in architecture.outer_names:
        return (architecture.outer_names.get(name) or OUTER_NAMES[name],)
    first, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    if first == "blk" and index.isdecimal() and rest in architecture.full_names:
        return (f"{architecture.layers_prefix}.{int(index)}.{architecture.full_names[rest]}",)
    part, _, kind = rest.rpartition(".")
    names = _expert_names(part, experts, *architecture.experts) if experts and architecture.experts is not None else []
    parts = {**architecture.legacy_fused, **architecture.fused}.get(part, (part,))
    names = [f"{expert}.{kind}" for expert in names] or [_layer_name(part, kind, architecture) for part in parts]
    if first != "blk" or not index.isdecimal() or None in names or kind not in ("weight", "bias"):
        return None
    return tuple(f"{architecture.layers_prefix}.{int(index)}.{layer_name}" for layer_name in names)


def _layer_name(part: str, kind: str, architecture: Architecture) -> str | None:
    """The checkpoint's name of a layer's tensor, with its kind if it has one; None for an unknown one."""
    name = architecture.layer_names.get(part) or LAYER_NAMES.get(part)
    return architecture.full_names.get(f"{part}.{kind}") or (name if part == SCORE_CORRECTION or name is None else f"{name}.{kind}")


def _expert_names(part: str, experts: int, module: str, names: Mapping[str, str]) -> list[str]:
    """The checkpoint's names of the matrices of experts, or of a router, without kind; empty for other tensors."""
    if part == ROUTER:
        return [f"{module}.gate"]
    base, _, number = part.partition(".")
    prefix = module and f"{module}."
    if number.isdecimal() and base in SINGLE_EXPERTS and int(number) < experts:
        return [f"{prefix}experts.{int(number)}.{names[SINGLE_EXPERTS[base]]}"]
    kinds = JOINT_EXPERTS.get(part) or ((EXPERTS[part],) if part in EXPERTS else ())
    return [f"{prefix}experts.{expert}.{names[kind]}" for expert in range(experts) for kind in kinds]


# Role of a family's tensor -> its name in a file, without layer and kind.
ROLES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "input_norm": "attn_norm", "post_norm": "ffn_norm", "q": "attn_q",
    "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "o_norm": "post_attention_norm",
    "down_norm": "post_ffw_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": ROUTER,
    "attn_gate": "attn_gate", "shared.scale": SHARED_EXPERT_GATE, "correction": SCORE_CORRECTION, **linear_attention.ROLES,
    **latent_attention.ROLES,
    **nextn.ROLES,
    **{f"shared.{target.removesuffix('_proj')}": part for part, target in SHARED_EXPERT.items()},
}


def file_part(role: str, architecture: Architecture) -> str:
    """The name of a role's tensor in a file, without layer and kind. Raises KeyError for a role that files do not have."""
    if is_table(role):
        return NGRAM_TENSOR
    base = (role if expert_of(role) is None else base_role(role)).removesuffix("_bias")
    name = architecture.roles.get(role) or architecture.roles.get(base) or ROLES[base]
    return f"{name}_exps" if expert_of(role) is not None else name
