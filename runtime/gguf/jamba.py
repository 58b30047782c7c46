"""GGUF metadata of Jamba, and what it cannot express.

Attention layers are those with KV heads, expert layers those with routers; a config states a period and an offset of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from .family_context import FamilyContext
from .state_spaces import export_limits as export_limits

FAMILY = "jamba"
INNER_SIZE = "inner_size"  # total width, a key of ours
# Key below the architecture's name -> key of config.json.
KEYS = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_dt_rank",
        "ssm.inner_size": INNER_SIZE, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
REQUIRED = (*(key for key in KEYS if key.startswith("ssm.")), "attention.head_count_kv")
LAYER_TYPES = "mamba", "attention"
# Fused matrix of the file -> its parts: convolution input and gate; low-rank dt, B and C.
FUSED = {"ssm_in": ("ssm_convolved", "ssm_gates"), "ssm_x": ("ssm_low", "ssm_keys")}
# Tensor of a layer in the file -> in the checkpoint, without kind; FULL_NAMES with kind.
NAMES = {"ssm_convolved": "mamba.in_x", "ssm_gates": "mamba.in_z", "ssm_low": "mamba.x_dt", "ssm_keys": "mamba.x_bc",
         "ssm_conv1d": "mamba.conv1d", "ssm_dt": "mamba.dt_proj", "ssm_dt_norm": "mamba.dt_layernorm", "ssm_b_norm": "mamba.b_layernorm",
         "ssm_c_norm": "mamba.c_layernorm", "ssm_out": "mamba.out_proj", "ffn_norm": "pre_ff_layernorm",
         "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj"}
FULL_NAMES = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_proj.bias",
              "ffn_gate_inp.weight": "feed_forward.router.weight"}
OUTER = {"output_norm.weight": "model.final_layernorm.weight"}
ROLES = {"state_in": "ssm_convolved", "state_gate": "ssm_gates", "state_rate": "ssm_low", "state_keys": "ssm_keys",
         "state_rate_wide": "ssm_dt", "state_rate_norm": "ssm_dt_norm", "state_b_norm": "ssm_b_norm", "state_c_norm": "ssm_c_norm",
         "state_skip": "ssm_d"}
DAMAGED_HINT = "the file is damaged or was converted wrongly: download it again, or use another one"


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, raw["sliding_window"] = context.header, context.window
    path, inner_size, hidden, layers = header.path, raw.pop(INNER_SIZE), raw["hidden_size"], raw["num_hidden_layers"]
    if type(inner_size) is int and type(hidden) is int and hidden > 0:
        if inner_size < 1 or inner_size % hidden:
            raise CheckpointError(f"{path} states {FAMILY}.ssm.inner_size {inner_size} for a width of {hidden}, of which it is not a "
                                  "multiple", DAMAGED_HINT)
        raw["mamba_expand"] = inner_size // hidden
    if type(layers) is not int:
        return  # the config reader refuses it
    kinds = raw.pop("layer_types", [LAYER_TYPES[1]] * layers)
    expert_layers = [layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors]
    if not expert_layers:
        raw |= {"num_experts": 1, "num_experts_per_tok": 1}
    for name, layers_of_kind in (("attn_layer", [layer for layer, kind in enumerate(kinds) if kind == LAYER_TYPES[1]]),
                                 ("expert_layer", expert_layers)):
        raw |= _period_and_offset(path, name, layers_of_kind, layers)
    raw["mamba_conv_bias"] = any(tensor.endswith(".ssm_conv1d.bias") for tensor in header.tensors)


def _period_and_offset(path: object, name: str, members: Sequence[int], layers: int) -> dict[str, object]:
    """The `<name>_period` and `<name>_offset` of evenly spaced layers. Raises CheckpointError for others."""
    if not members:
        return {}
    period = members[1] - members[0] if len(members) > 1 else layers
    if list(members) != list(range(members[0], layers, period)) or members[0] >= period:
        description = "attention" if name == "attn_layer" else "experts"
        raise CheckpointError(f"{path} has {description} in layers {list(members)[:8]} of {layers}, which is not supported",
                              "published models of this family have them at equal distances")
    return {f"{name}_period": period, f"{name}_offset": members[0]}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the recurrent layers, without the architecture's prefix."""
    state = config.recurrent
    heads = [0 if layer in config.recurrent_layers else config.num_key_value_heads for layer in range(config.num_hidden_layers)]
    return {"ssm.conv_kernel": state.taps, "ssm.state_size": state.depth, "ssm.time_step_rank": state.rank, "ssm.inner_size": state.values,
            "attention.head_count_kv": np.array(heads, np.int32)}
