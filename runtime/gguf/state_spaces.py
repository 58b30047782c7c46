"""GGUF metadata of hybrid models with Mamba 2 layers, and what it cannot express."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import ModelConfig
from .family_context import FamilyContext

INNER_SIZE = "inner_size"  # total width, a key of ours
# Key below the architecture's name -> key of config.json.
KEYS = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads", "ssm.inner_size": INNER_SIZE, "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok", "expert_shared_feed_forward_length": "shared_intermediate_size"}
REQUIRED = (*(key for key in KEYS if key.startswith("ssm.")), "attention.head_count_kv", "attention.scale")
LAYER_TYPES = "mamba", "attention"
ROPE_FINETUNED = "rope.scaling.finetuned"  # false means no RoPE
# Fused matrix of the file -> its parts: gate, convolution input, dt.
FUSED = {"ssm_in": ("ssm_z", "ssm_xbc", "ssm_steps")}
# Tensor of a layer in the file -> in the checkpoint, without kind; FULL_NAMES with kind.
NAMES = {"ssm_z": "mamba.gate_proj", "ssm_xbc": "mamba.xbc_proj", "ssm_steps": "mamba.dt_proj", "ssm_conv1d": "mamba.conv1d",
         "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj", "ffn_down": "shared_mlp.output_linear",
         "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj", "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
         "ffn_down_shexp": "shared_mlp.output_linear"}
FULL_NAMES = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
ROLES = {"state_gate": "ssm_z", "state_in": "ssm_xbc", "state_rate": "ssm_steps", "state_skip": "ssm_d"}
DECAY = ".mamba.A_log"
EXPAND = 2  # llama.cpp assumes an inner size of twice the hidden size


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, name = context.header, context.name
    if context.window:
        return  # the config reader refuses it
    path, (inner_size, heads, hidden) = header.path, (raw.pop(INNER_SIZE), raw["mamba_n_heads"], raw["hidden_size"])
    if type(inner_size) is type(heads) is type(hidden) is int and heads > 0 and hidden > 0:
        if inner_size < 1 or inner_size % heads or inner_size % hidden:
            raise CheckpointError(f"{path} states {name}.ssm.inner_size {inner_size} for {heads} heads and a width of {hidden}, "
                                  "one of which it is not a multiple of",
                                  "the file is damaged or was converted wrongly: download it again, or use another one")
        raw |= {"mamba_d_head": inner_size // heads, "mamba_expand": inner_size // hidden}
    has_rope = header.metadata.get(f"{name}.{ROPE_FINETUNED}", True)
    if not isinstance(has_rope, bool):
        damaged(path, f"states {name}.{ROPE_FINETUNED} {has_rope!r}, expected true or false")
    if not raw.setdefault("num_local_experts", 0):
        raw["shared_intermediate_size"] = raw["intermediate_size"]
    raw |= {"position_embedding_type": "rope" if has_rope else "nope",
            "mamba_conv_bias": any(tensor.endswith(".ssm_conv1d.bias") for tensor in header.tensors),
            "attention_bias": any(tensor.endswith(".attn_q.bias") for tensor in header.tensors)}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of state spaces, without the architecture's prefix, of a model that has them."""
    state = config.recurrent
    heads = [0 if layer in config.recurrent_layers else config.num_key_value_heads for layer in range(config.num_hidden_layers)]
    keys: dict[str, Value] = {"ssm.conv_kernel": state.taps, "ssm.state_size": state.depth, "ssm.group_count": state.groups,
                              "ssm.time_step_rank": state.heads, "ssm.inner_size": state.values,
                              "attention.head_count_kv": np.array(heads, np.int32)}
    if config.moe is not None:
        keys |= {"feed_forward_length": config.moe.expert_dim, "expert_shared_feed_forward_length": config.moe.shared_expert_dim}
    return keys


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express of a model with state spaces."""
    yield config.recurrent.values != EXPAND * config.hidden_size, \
        f"has state spaces of {config.recurrent.values} channels for a width of {config.hidden_size}"
    yield not config.recurrent.biased, "has convolutions without biases"  # llama.cpp requires them
