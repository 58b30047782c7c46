"""`Architecture`: how a GGUF architecture names and stores a family's tensors; the parts common to all of them.

llama files interleave the rows of q and k of every head, because llama.cpp rotates neighbouring channels where checkpoints rotate
halves; gemma files have one added to norms. Both are undone on load. The experts of a layer are one tensor, expert after expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import linear_attention

# The parts of a tensor's name: in the file -> in a checkpoint of the Hugging Face kind.
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
ROUTER = "ffn_gate_inp"
SHARED_EXPERT = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
CORRECTION = "exp_probs_b"  # of scores; it has kind bias and no weight
SHARE = "ffn_gate_inp_shexp"
DEEPSEEK_OCR = "deepseek2-ocr"
DEEP = "n_deepstack_layers"  # which see what images are made into
SHARED_WIDTH = "shared_width"  # which no config states by itself
# Divisors of the rotary frequencies: part of the config, not weights. One for all lengths, or one for short texts and one for long ones.
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
DIVISORS = (FACTORS, LONG, SHORT)
POOLED = {1: "mean", 3: "last"}  # pooling_type -> how embeddings are made (`embedding.py`)
CLAMP = "attention.clamp_kqv"
ALPHA = "rope.scaling.alpha"  # what the base of rotary positions is stretched by, to a power
RANK = 4  # the same of models that rank documents (`reranker.py`)
# Key below the architecture's name -> the one value that changes nothing of an answer, or those that do not.
NEUTRAL: Mapping[str, object] = {
    "attention.causal": True, CLAMP: 0.0, "attention.scale": None, "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0, "expert_count": 0, "expert_gating_func": 1, "expert_shared_count": 0, "expert_used_count": 0,
    "expert_group_count": 1, "expert_group_used_count": 1, "final_logit_softcapping": 0.0, "logit_scale": 1.0,
    "pooling_type": (0, *POOLED, RANK), "residual_scale": 1.0, "rope.dimension_sections": None, "use_parallel_residual": False,
}
RMS_NORM, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
UNTURNED = "rope.scaling.finetuned"  # read of granite alone, where false leaves rotary positions out
HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "classifier.output_labels", UNTURNED})


@dataclass(frozen=True)
class Architecture:
    """`family` runs it; `config` is what its config.json says beside the translated keys, `keys` are translated beside the usual ones.

    `interleaved`: q and k rows are; `norm_offset` was added to every norm; `layer_names` go before LAYER; `fused`: part of a tensor's name
    -> the parts that lie in it one after the other, of q, k, v or of equal height; `fused_before` are those that older files have as well.
    `partial`: not all of a head need turn. `experts`: where a layer of a checkpoint has them, and what it calls their three matrices.
    `pattern`: a file may say which layers have a window. `roles` go before ROLES, `outer` are names beside OUTER. `epsilon`: the key of
    the norms' one. `required`: keys that must be there beside the usual ones, `optional` ones of these need not. `read`: keys that are
    read, though not by translation. `whole`: parts of tensors' names with their kinds, where a checkpoint says no kind. `kinds`: what a
    checkpoint calls a layer that has no heads of keys and values, and one that has. `as_is`: norms of a checkpoint to which nothing was
    added. `parts`: roles of what files hold in parts, one after the other -> those. `layers`: under what a checkpoint
    keeps its layers.
    """

    family: str
    config: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    layer_names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial: bool = False
    experts: tuple[str, Mapping[str, str]] | None = None
    pattern: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    epsilon: str = RMS_NORM
    required: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, str] | None = None
    as_is: frozenset[str] = frozenset()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: str = "model.layers"

    def offset(self, name: str) -> float:
        """What was added to a tensor of a checkpoint."""
        grown = "norm" in name and linear_attention.OWN_NORM not in name and not name.endswith("bias")
        return self.norm_offset if grown and name not in self.as_is else 0.0
