"""`Architecture`: how a GGUF architecture names and stores a family's tensors; the parts common to all of them.

llama files interleave the rows of q and k of every head, because llama.cpp rotates neighbouring channels where checkpoints rotate
halves; gemma files add one to norm weights. Both are undone on load. The experts of a layer are one tensor, expert after expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import linear_attention

# The parts of a tensor's name: in the file -> in a checkpoint of the Hugging Face kind.
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
               "output.weight": "lm_head.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
ROUTER = "ffn_gate_inp"
SHARED_EXPERT = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
SCORE_CORRECTION = "exp_probs_b"  # correction bias of expert scores: a bias without a weight
SHARED_EXPERT_GATE = "ffn_gate_inp_shexp"
DEEPSEEK_OCR = "deepseek2-ocr"
DEEPSTACK = "n_deepstack_layers"  # number of text layers that image features are added to
SHARED_EXPERT_WIDTH = "shared_width"  # total width of the shared experts; a key of ours, in no config.json
# Tensors of RoPE frequency factors, which divide the frequencies: one for all context lengths, or one for short and one for long.
# They are part of the config, not weights.
ROPE_FACTORS, LONG_ROPE_FACTORS, SHORT_ROPE_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTOR_TENSORS = (ROPE_FACTORS, LONG_ROPE_FACTORS, SHORT_ROPE_FACTORS)
POOLING_TYPES = {1: "mean", 3: "last"}  # pooling_type of embedding models (`embedding.py`)
CLAMP_KQV = "attention.clamp_kqv"
ROPE_ALPHA = "rope.scaling.alpha"  # NTK-aware scaling of the RoPE base
RERANKER_POOLING_TYPE = 4  # pooling_type of rerankers (`reranker.py`)
# Key below the architecture's name -> the value, or values, that have no effect; others are refused where no family reads the key.
NEUTRAL_VALUES: Mapping[str, object] = {
    "attention.causal": True, CLAMP_KQV: 0.0, "attention.scale": None, "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0, "expert_count": 0, "expert_gating_func": 1, "expert_shared_count": 0, "expert_used_count": 0,
    "expert_group_count": 1, "expert_group_used_count": 1, "final_logit_softcapping": 0.0, "logit_scale": 1.0,
    "pooling_type": (0, *POOLING_TYPES, RERANKER_POOLING_TYPE), "residual_scale": 1.0, "rope.dimension_sections": None,
    "use_parallel_residual": False,
}
RMS_NORM, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
ROPE_FINETUNED = "rope.scaling.finetuned"  # false means no RoPE, for granite only
IGNORED_KEYS = frozenset({"vocab_size", "tensor_data_layout", "classifier.output_labels", ROPE_FINETUNED})


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture names and stores a family's tensors. Tensor names are the file's, without layer and kind unless noted."""

    family: str
    config: Mapping[str, object] = field(default_factory=dict)  # entries of config.json that no key states
    keys: Mapping[str, str] = field(default_factory=dict)  # key in the file -> in config.json, in addition to `config.KEYS`
    interleaved: bool = False  # rows of q and k are interleaved within heads
    norm_offset: float = 0.0  # added to the norms of the file
    layer_names: Mapping[str, str] = field(default_factory=dict)  # of a layer's tensors; these precede LAYER_NAMES
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # tensor -> the ones it consists of, q, k, v or of equal height
    legacy_fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # `fused` of older files
    partial_rotary: bool = False  # only some channels of a head may rotate
    experts: tuple[str, Mapping[str, str]] | None = None  # (module of a layer's experts in the checkpoint, names of their matrices)
    window_pattern: bool = False  # a key may say which layers have a sliding window
    roles: Mapping[str, str] = field(default_factory=dict)  # role -> tensor; these precede ROLES
    outer_names: Mapping[str, str] = field(default_factory=dict)  # of tensors outside the layers, in addition to OUTER_NAMES
    epsilon_key: str = RMS_NORM
    required_keys: tuple[str, ...] = ()  # in addition to `config.REQUIRED_KEYS`
    optional_keys: frozenset[str] = frozenset()  # of `config.REQUIRED_KEYS`, those that may be absent
    other_keys: frozenset[str] = frozenset()  # known keys that are not translated
    full_names: Mapping[str, str] = field(default_factory=dict)  # with kind -> name in the checkpoint, where that has no kind
    layer_kinds: tuple[str, str] | None = None  # `layer_types` of config.json for layers without and with KV heads
    unshifted_norms: frozenset[str] = frozenset()  # norms of the checkpoint without `norm_offset`
    split_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # role -> the tensors it is stored as, one after the other
    layers_prefix: str = "model.layers"  # of the checkpoint

    def offset(self, name: str) -> float:
        """What the file adds to a checkpoint tensor's values."""
        is_shifted = "norm" in name and linear_attention.GATED_NORM not in name and not name.endswith("bias")
        return self.norm_offset if is_shifted and name not in self.unshifted_norms else 0.0
