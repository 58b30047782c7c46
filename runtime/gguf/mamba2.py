"""GGUF metadata of Mamba 2. Heads and MLP widths, which no layer has, are stated as 0."""

from __future__ import annotations

from collections.abc import Iterator

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from . import jamba, mamba, state_spaces
from .family_context import FamilyContext

NAME = "mamba2"
INNER_SIZE = "inner_size"  # total width, a key of ours
# Key below the architecture's name -> key of config.json.
KEYS = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "num_heads",
        "ssm.inner_size": INNER_SIZE, "attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
REQUIRED = tuple(key for key in KEYS if key.startswith("ssm."))
NAMES = {"attn_norm": "norm"} | {part: target.replace("mamba.", "mixer.") for part, target in state_spaces.NAMES.items()
                                 if target.startswith("mamba.")}
FULL_NAMES = {part: target.replace("mamba.", "mixer.") for part, target in state_spaces.FULL_NAMES.items()}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, raw["sliding_window"] = context.header, context.window
    for key in mamba.ABSENT_SIZES:
        raw.pop(key, None)
    inner_size, heads, hidden = raw.pop(INNER_SIZE), raw["num_heads"], raw["hidden_size"]
    if type(inner_size) is type(heads) is type(hidden) is int and heads > 0 and hidden > 0:
        if inner_size < 1 or inner_size % heads or inner_size % hidden:
            raise CheckpointError(f"{header.path} states {NAME}.ssm.inner_size {inner_size} for {heads} heads and a width of {hidden}, "
                                  "one of which it is not a multiple of", jamba.DAMAGED_HINT)
        raw |= {"head_dim": inner_size // heads, "expand": inner_size // hidden}
    raw["use_conv_bias"] = any(tensor.endswith(".ssm_conv1d.bias") for tensor in header.tensors)


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the recurrent layers, without the architecture's prefix."""
    state = config.recurrent
    return {"ssm.conv_kernel": state.taps, "ssm.state_size": state.depth, "ssm.group_count": state.groups,
            "ssm.time_step_rank": state.heads,
            "ssm.inner_size": state.values, "attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield from state_spaces.export_limits(config)
