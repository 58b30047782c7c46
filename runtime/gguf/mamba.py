"""GGUF metadata of Mamba and Falcon Mamba, one architecture in GGUF, and what it cannot express.

Heads and MLP widths, which no layer has, are stated as 0. The epsilon of Falcon Mamba's dt, B and C norms is not stated: published
models' value is used, and llama.cpp uses that of the other norms.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import ModelConfig
from . import jamba
from .family_context import FamilyContext

NAME, FALCON_MAMBA = "mamba", "falcon_mamba"
INNER_SIZE, BC_NORM_KEY = "inner_size", "ssm.dt_b_c_rms"  # total width, a key of ours; whether dt, B and C have RMS norms
# Key below the architecture's name -> key of config.json.
KEYS = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.time_step_rank": "time_step_rank",
        "ssm.inner_size": INNER_SIZE,
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
REQUIRED = tuple(key for key in KEYS if key.startswith("ssm."))
NAMES = {"attn_norm": "norm"} | {part: target.replace("mamba.", "mixer.")
                                 for part, target in jamba.NAMES.items() if target.startswith("mamba.")}
FULL_NAMES = {part: target.replace("mamba.", "mixer.") for part, target in jamba.FULL_NAMES.items() if target.startswith("mamba.")}
OUTER = {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"}
MIXER_NORM_EPS = 1e-6  # of the dt, B and C norms; no key states it
ABSENT_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, raw["sliding_window"] = context.header, context.window
    has_bc_norms = header.metadata.get(f"{NAME}.{BC_NORM_KEY}", False)
    if not isinstance(has_bc_norms, bool):
        damaged(header.path, f"states {NAME}.{BC_NORM_KEY} {has_bc_norms!r}, expected true or false")
    for key in ABSENT_SIZES:
        raw.pop(key, None)
    inner_size = raw.pop(INNER_SIZE)
    if type(inner_size) is not int or inner_size < 1:
        raise CheckpointError(f"{header.path} states {NAME}.ssm.inner_size {inner_size!r}, expected a width", jamba.DAMAGED_HINT)
    raw |= {"model_type": FALCON_MAMBA if has_bc_norms else NAME, "intermediate_size": inner_size,
            "use_conv_bias": any(tensor.endswith(".ssm_conv1d.bias") for tensor in header.tensors)}
    raw |= {"mixer_rms_eps": MIXER_NORM_EPS} if has_bc_norms else {}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the recurrent layers, without the architecture's prefix."""
    state = config.recurrent
    return {"ssm.conv_kernel": state.taps, "ssm.state_size": state.depth, "ssm.time_step_rank": state.rank, "ssm.inner_size": state.values,
            BC_NORM_KEY: state.normed, "attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield from jamba.export_limits(config)
    yield config.recurrent.normed and config.recurrent_norm_eps != MIXER_NORM_EPS, \
        f"norms its steps with an epsilon of {config.recurrent_norm_eps}"
