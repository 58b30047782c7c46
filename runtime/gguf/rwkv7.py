"""GGUF metadata of RWKV 7: token shift factors fused in one tensor, and value residual weights in the first layer, which are never read."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from ..families.rwkv7 import MIX_LETTERS, PLACEHOLDER_SIZES
from .family_context import FamilyContext

FAMILY = "rwkv7"
EPSILON = "attention.layer_norm_epsilon"
# Key below the architecture's name -> key of config.json.
KEYS = {"wkv.head_size": "head_dim", "attention.decay_lora_rank": "decay_low_rank_dim", "attention.iclr_lora_rank": "a_low_rank_dim",
        "attention.value_residual_mix_lora_rank": "v_low_rank_dim", "attention.gate_lora_rank": "gate_low_rank_dim", EPSILON: "norm_eps"}
REQUIRED = tuple(key for key in KEYS if key != EPSILON)
TOKEN_SHIFT_COUNT = "token_shift_count"  # rows of the previous token that a layer keeps: one for attention, one for the MLP
CONFIG = {"hidden_act": "sqrelu"}
# Tensor of a layer in the file -> in the checkpoint, without kind; FULL_NAMES with kind.
FUSED = {"time_mix_lerp_fused": tuple(f"lerp_{letter}" for letter in MIX_LETTERS)}
NAMES = {"attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm", "time_mix_receptance": "attn.r_proj",
         "time_mix_key": "attn.k_proj", "time_mix_value": "attn.v_proj", "time_mix_output": "attn.o_proj", "channel_mix_key": "ffn.key",
         "channel_mix_value": "ffn.value"}
LORA_PARTS = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}  # number in the file -> part of a LoRA module in the checkpoint
FULL_NAMES = {f"lerp_{letter}.weight": f"attn.x_{letter}" for letter in MIX_LETTERS} | {
    f"time_mix_{letter}{number}.weight": f"attn.{letter}_lora.lora.{target}" for letter in "wavg"
    for number, target in LORA_PARTS.items()} | {
    f"time_mix_{name}.weight": f"attn.{name}" for name in ("k_k", "k_a", "r_k")} | {"channel_mix_lerp_k.weight": "ffn.x_k"}
# Role -> tensor of a layer in the file; LoRA biases are tensors of their own there.
ROLES = {"entry_norm": "token_embd_norm", "post_norm": "attn_norm_2", "state_norm": "time_mix_ln", "state_r": "time_mix_receptance",
         "state_k": "time_mix_key", "state_v": "time_mix_value", "state_out": "time_mix_output", "up": "channel_mix_key",
         "down": "channel_mix_value", "shift_up": "channel_mix_lerp_k.weight",
         **{f"shift_{letter}": f"lerp_{letter}" for letter in MIX_LETTERS},
         **{f"state_{letter}_{end}": f"time_mix_{letter}{number}.weight" for letter in "wavg"
            for end, number in (("in", 1), ("out", 2), ("out_bias", 0))},
         "state_direction": "time_mix_k_k.weight", "state_remains": "time_mix_k_a.weight", "state_bonus": "time_mix_r_k.weight"}
# Keys of heads and RoPE that this architecture does not have.
ABSENT_KEYS = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned")
GROUP_NORM_EPS = 64e-5  # epsilon of the group norm after the recurrence; no key states it
OUTER = {"token_embd.weight": "model.embeddings.weight", "output_norm.bias": "model.norm.bias",
         **{f"token_embd_norm.{kind}": f"model.layers.0.pre_norm.{kind}" for kind in ("weight", "bias")}}
ARCHITECTURE = {"config": CONFIG, "keys": KEYS, "epsilon_key": EPSILON, "required_keys": REQUIRED, "layer_names": NAMES,
                "full_names": FULL_NAMES,
                "fused": FUSED, "outer_names": OUTER, "roles": ROLES, "other_keys": frozenset({TOKEN_SHIFT_COUNT})}  # all of it
UNUSED_TENSORS = re.compile(r"model\.layers\.0\.attn\.v_lora\..+")


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, raw["sliding_window"] = context.header, context.window
    if (stated := header.metadata.get(f"{FAMILY}.{TOKEN_SHIFT_COUNT}", 2)) != 2:
        raise CheckpointError(f"{header.path} states {FAMILY}.{TOKEN_SHIFT_COUNT} {shown_value(stated)}, which is not supported",
                              "layers of this family keep two rows of the previous token: convert the original checkpoint again")
    for key in PLACEHOLDER_SIZES:
        raw.pop(key, None)
    raw["norm_bias"] = any(name.endswith("attn_norm.bias") for name in header.tensors)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint tensor is a value residual weight of the first layer, which converters write although it is unused."""
    return config.family == FAMILY and UNUSED_TENSORS.fullmatch(name) is not None


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the recurrent layers, without the architecture's prefix."""
    state = config.recurrent
    ranks = dict(zip(("decay", "iclr", "value_residual_mix", "gate"), state.ranks, strict=True))
    return {"wkv.head_size": state.head_dim, **{f"attention.{name}_lora_rank": rank for name, rank in ranks.items()}, TOKEN_SHIFT_COUNT: 2,
            "attention.head_count": 0, "attention.head_count_kv": 0}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield not np.isclose(config.recurrent.eps, GROUP_NORM_EPS, rtol=1e-4), \
        f"has an epsilon of {config.recurrent.eps:g} behind its recurrence instead of {GROUP_NORM_EPS:g}"
    yield not config.norm_bias, "has norms without biases"


def placeholder_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Zeros for the first layer's value residual weights by name, float32: unused, but llama.cpp requires them."""
    hidden, rank = config.hidden_size, config.recurrent.ranks[1]
    shapes = (hidden,), (rank, hidden), (hidden, rank)
    return {f"blk.0.time_mix_v{number}.weight": np.zeros(shape, "<f4") for number, shape in enumerate(shapes)}
