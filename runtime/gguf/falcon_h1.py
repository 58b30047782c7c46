"""GGUF metadata of Falcon H1: the config's multipliers are already folded into the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import Value
from ..config import ModelConfig
from ..weights.state_weights import channel_multipliers
from . import state_spaces
from .family_context import FamilyContext

NAME, FAMILY = "falcon-h1", "falcon_h1"
# Key below the architecture's name -> key of config.json.
KEYS = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads", "ssm.inner_size": "mamba_d_ssm"}
REQUIRED = tuple(KEYS)
# Tensor of a layer in the file -> in the checkpoint, without kind. llama.cpp's converter writes the MLP norm without a kind.
NAMES = {**{part: target for part, target in state_spaces.NAMES.items() if part.startswith("ssm_")}, "ffn_norm": "pre_ff_layernorm",
         "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj"}
FULL_NAMES = {**state_spaces.FULL_NAMES, "ffn_norm": "pre_ff_layernorm.weight"}
OUTER = {"output_norm.weight": "model.final_layernorm.weight"}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled: biases and norms, by the tensors there are."""
    header, raw["sliding_window"] = context.header, context.window
    ends = {"mamba_rms_norm": ".ssm_norm.weight", "mamba_conv_bias": ".ssm_conv1d.bias", "attention_bias": ".attn_q.bias",
            "mlp_bias": ".ffn_gate.bias"}
    raw |= {key: any(tensor.endswith(end) for tensor in header.tensors) for key, end in ends.items()}
    raw["mamba_norm_before_gate"] = False


def tensor_multipliers(config: ModelConfig) -> Mapping[str, float | np.ndarray]:
    """Role -> multiplier folded into the tensor in the file, one or one per row; empty for other families."""
    if config.family != FAMILY:
        return {}
    roles = ("o", "down", "post_norm", "state_out", "state_gate", "state_rate")
    scale = 1.0 if config.attn_scale is None else config.attn_scale * config.head_dim**0.5
    return {**{role: config.multiplier(role) for role in roles}, "q": scale, "state_in": channel_multipliers(config),
            "embed": config.embedding_multiplier, "head": 1 / config.logits_scaling}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of state spaces, without the architecture's prefix."""
    state = config.recurrent
    return {"ssm.conv_kernel": state.taps, "ssm.state_size": state.depth, "ssm.group_count": state.groups,
            "ssm.time_step_rank": state.heads,
            "ssm.inner_size": state.values}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield not config.recurrent.biased, "has convolutions without biases"  # llama.cpp requires them
