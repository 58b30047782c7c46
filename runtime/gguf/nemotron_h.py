"""GGUF metadata of Nemotron H: every block is one of attention, Mamba or MLP, as in its checkpoints; per-block head counts and MLP
widths say which.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import damaged
from ..config import ModelConfig
from ..families import nemotron_h
from . import state_spaces
from .family_context import FamilyContext

FAMILY, MOE_LATENT_SIZE = "nemotron_h", "moe_latent_size"
DENSE, MOE = "nemotron_h", "nemotron_h_moe"  # architectures
# Key below the architecture's name -> key of config.json.
KEYS = {**{key: ours for key, ours in state_spaces.KEYS.items() if key.startswith("ssm.")},
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads"}
MOE_KEYS = {"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_scale": "routed_scaling_factor",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size", "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "expert_gating_func": "scoring_func",
            MOE_LATENT_SIZE: MOE_LATENT_SIZE, "nextn_predict_layers": "num_nextn_predict_layers"}
PER_BLOCK_KEYS = ("attention.head_count_kv", "feed_forward_length")  # one value per block, 0 for none
REQUIRED = (*(key for key in KEYS if key.startswith("ssm.")), PER_BLOCK_KEYS[0])
# Tensor of a layer in the file -> in the checkpoint, without kind; FULL_NAMES with kind.
NAMES = {"attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj",
         "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ssm_z": "mixer.gate_proj", "ssm_xbc": "mixer.xbc_proj",
         "ssm_steps": "mixer.dt_proj", "ssm_conv1d": "mixer.conv1d", "ssm_norm": "mixer.norm", "ssm_out": "mixer.out_proj",
         "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
         "exp_probs_b": "mixer.gate.e_score_correction_bias",
         **dict.fromkeys(("ffn_latent_down", "ffn_latent_in"), "mixer.fc1_latent_proj"),
         **dict.fromkeys(("ffn_latent_up", "ffn_latent_out"), "mixer.fc2_latent_proj")}
FULL_NAMES = {"ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_dt.bias": "mixer.dt_bias"}
OUTER = {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"}
ROLES = {**state_spaces.ROLES, "post_norm": "attn_norm", "experts_in": "ffn_latent_down", "experts_out": "ffn_latent_up"}
MTP_LAYERS = "nextn_predict_layers"  # included in the block count
DECAY = ".mixer.A_log"


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    context.require_sigmoid_scores(raw)
    header, name, raw["sliding_window"] = context.header, context.name, context.window
    path, blocks, kinds = header.path, raw["num_hidden_layers"], []
    heads, widths = (_per_block(header, f"{name}.{key}", blocks) for key in PER_BLOCK_KEYS)
    mtp_layers = raw.pop("num_nextn_predict_layers", 0)
    if type(mtp_layers) is not int or not 0 <= mtp_layers < len(heads):
        damaged(path, f"states {name}.{MTP_LAYERS} {shown_value(mtp_layers)} of {len(heads)} blocks")
    raw["num_hidden_layers"] = blocks = len(heads) - mtp_layers
    heads, widths = heads[:blocks], widths[:blocks]
    for block, (count, width) in enumerate(zip(heads, widths)):
        if count and width:
            damaged(path, f"states heads and a width of block {block}, which is one thing")
        mlp_kind = "moe" if f"blk.{block}.ffn_gate_inp.weight" in header.tensors else "mlp"
        kinds.append("attention" if count else mlp_kind if width else "mamba")
    for config_key, key, counts in (("num_key_value_heads", PER_BLOCK_KEYS[0], heads), ("intermediate_size", PER_BLOCK_KEYS[1], widths)):
        distinct = sorted({count for count in counts if count})
        if len(distinct) > 1:
            damaged(path, f"states {name}.{key} {distinct[:8]}, which differ by block")
        raw[config_key] = distinct[0] if distinct else None
    inner_size, count = raw.pop(state_spaces.INNER_SIZE), raw["mamba_num_heads"]
    if type(inner_size) is not int or type(count) is not int or count < 1 or inner_size < 1 or inner_size % count:
        damaged(path, f"states {name}.ssm.inner_size {inner_size} for {count} heads, of which it is not a multiple")
    if "moe" in kinds and MOE_LATENT_SIZE not in raw:  # Ollama's converter omits the key, and names the matrices in and out
        latent_in = header.tensors.get(f"blk.{kinds.index('moe')}.ffn_latent_in.weight")
        raw |= {} if latent_in is None or len(latent_in.shape) != 2 else {MOE_LATENT_SIZE: latent_in.shape[0]}
    raw |= {"layers_block_type": kinds, "mamba_head_dim": inner_size // count,
            "use_conv_bias": any(tensor.endswith(".ssm_conv1d.bias") for tensor in header.tensors),
            "attention_bias": any(tensor.endswith(".attn_q.bias") for tensor in header.tensors)}


def _per_block(header: GgufHeader, key: str, blocks: object) -> list[int]:
    value = header.metadata.get(key)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != blocks or (value < 0).any():
        damaged(header.path, f"states {key} that is not a number for each of {blocks} blocks")
    return value.tolist()


def block_of(config: ModelConfig, layer: int, role: str) -> int:
    """The index of the file's block that holds a role of a layer."""
    if config.family != FAMILY:
        return layer
    return nemotron_h.stored_layer_of(config, layer) + (layer not in config.layers_without_mlp and nemotron_h.is_mlp_role(role))


def is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a tensor of a file belongs to a multi-token prediction block."""
    block = name.removeprefix("blk.").partition(".")[0]
    return name.startswith("mtp.") or block.isdecimal() and int(block) >= nemotron_h.stored_layer_of(config, config.num_hidden_layers)


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of this family, without the architecture's prefix, or in another form than other families'."""
    blocks = nemotron_h.stored_layer_of(config, config.num_hidden_layers)
    heads, widths = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    state, moe = config.recurrent, config.moe
    for layer in range(config.num_hidden_layers):
        first = nemotron_h.stored_layer_of(config, layer)
        heads[first] = 0 if layer in config.recurrent_layers else config.num_key_value_heads
        if layer not in config.layers_without_mlp:
            widths[first + 1] = config.intermediate_size if moe is None else moe.expert_dim
    keys: dict[str, Value] = {"block_count": blocks, "attention.head_count_kv": heads, "feed_forward_length": widths,
                              "ssm.conv_kernel": state.taps, "ssm.state_size": state.depth, "ssm.group_count": state.groups,
                              "ssm.time_step_rank": state.heads, "ssm.inner_size": state.values,
                              "attention.layer_norm_epsilon": float(config.norm_eps)}  # llama.cpp requires it too
    if moe is None:
        return keys
    if moe.latent_dim:
        keys[MOE_LATENT_SIZE] = moe.latent_dim
    return keys | {"expert_feed_forward_length": moe.expert_dim, "expert_shared_feed_forward_length": moe.shared_expert_dim,
                   "expert_shared_count": 1, "expert_weights_norm": moe.renormalise,
                   "expert_weights_scale": float(moe.routed_scale),
                   "expert_group_count": moe.num_groups, "expert_group_used_count": moe.top_groups}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    moe = config.moe
    yield moe is not None and len(moe.layers) + len(config.layers_without_mlp) < config.num_hidden_layers, "has MLPs beside experts"
    yield moe is not None and moe.top_groups < moe.num_groups, "chooses experts by groups"
