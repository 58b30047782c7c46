"""GGUF metadata of Gemma 3n: MLP widths per layer, activation sparsity, and the AltUp matrices, one of them stored as two tensors."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from ...offload.gguf_header import shown_value
from ...offload.safetensors_header import damaged
from ..config import ModelConfig
from . import gemma4
from .family_context import FamilyContext

NAME, FAMILY = "gemma3n", "gemma3n_text"
# Key below the architecture's name -> key of config.json. The last two are the names of Ollama's converter.
KEYS = {"altup.active_idx": "altup_active_idx", "altup.correct_scale": "altup_correct_scale", "altup.lr_multiplier": "altup_lr_multiplier",
        "altup.num_inputs": "altup_num_inputs", "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input", "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
        "rope.freq_base_local": "rope_local_base_freq", "head_dim": "head_dim"}
PER_LAYER_KEYS = ("feed_forward_length",)  # keys with one value, or one per layer
ACTIVATION_SPARSITY = "activation_sparsity_scale"  # per layer: gates below mean + x standard deviations become 0; -inf for none
REQUIRED = ("altup.num_inputs", "attention.shared_kv_layers", "embedding_length_per_layer_input")
WINDOW_PERIOD = 5  # default: every fifth layer has no sliding window
NAMES = {**{part: gemma4.NAMES[part] for part in ("post_attention_norm", "ffn_norm", "post_ffw_norm", "inp_gate", "proj", "post_norm")},
         "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm", "altup_predict_coef": "altup.prediction_coefs",
         "altup_correct_coef": "altup.correction_coefs", "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
         "laurel_post_norm": "laurel.post_laurel_norm"}
FULL_NAMES = {"altup_correct_scale.weight": "altup.correct_output_scale"}
STACKED_MATRICES = {"altup_proj.weight": "model.altup_projections", "altup_unembd_proj.weight": "model.altup_unembed_projections"}


def stacked_names(name: str, config: ModelConfig) -> tuple[str, ...] | None:
    """Checkpoint names of the matrices stacked in a tensor of STACKED_MATRICES; None for a model with one residual stream."""
    return tuple(f"{STACKED_MATRICES[name]}.{i}.weight" for i in range(config.residual_streams - 1)) or None


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header, kinds = context.header, context.layer_types(raw, WINDOW_PERIOD)
    tensors, layers = header.tensors, len(kinds)
    for name, config_key in (("blk.0.laurel_l.weight", "laurel_rank"), ("per_layer_token_embd.weight", "vocab_size_per_layer_input")):
        if name not in tensors:
            damaged(header.path, f"lacks tensor {name}")
        raw[config_key] = tensors[name].shape[0]
    raw |= {"layer_types": kinds, "sliding_window": context.window, "attention_bias": "blk.0.attn_q.bias" in tensors,
            "intermediate_size": gemma4.per_layer(header, NAME, PER_LAYER_KEYS[0], layers)}
    shared = raw["num_kv_shared_layers"]
    if isinstance(shared, float) and shared.is_integer():  # files state it as a float
        raw["num_kv_shared_layers"] = int(shared)
    sparsity = header.metadata.get(f"{NAME}.{ACTIVATION_SPARSITY}")
    if sparsity is None:
        return
    if not isinstance(sparsity, np.ndarray) or sparsity.dtype.kind != "f" or len(sparsity) != layers or np.isnan(sparsity).any():
        damaged(header.path, f"states {NAME}.{ACTIVATION_SPARSITY} {shown_value(sparsity)}, expected a number for each of {layers} layers")
    raw["activation_sparsity_pattern"] = [NormalDist().cdf(float(each)) if np.isfinite(each) else float(each > 0) for each in sparsity]
