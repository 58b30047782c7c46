"""RoPE of an exported model: scaling keys, frequency factor tensors, and what llama.cpp ignores of them."""

from __future__ import annotations

import numpy as np

from ... import EffllmError
from ...offload.gguf_header import Value
from ..config import ModelConfig
from ..config_rope import RopeConfig
from ..rope import RopeTable, rope_table
from . import gemma4, gpt_oss, step35, yarn
from .architecture import LONG_ROPE_FACTORS, ROPE_FACTORS, SHORT_ROPE_FACTORS
from .file_architecture import file_architecture

LONGROPE_FAMILIES = ("minicpm", "minicpm3", "phi3")  # families for which llama.cpp selects factors by the requested context length
PLACEHOLDER_ROPE = RopeConfig(10_000.0, "default", {})  # stated by the file of a model without RoPE
FOLDER_HINT = "use the model folder itself"


def ignored_rope_scaling(config: ModelConfig) -> str:
    """A notice about the RoPE scaling settings that llama.cpp ignores; empty if it reads them all."""
    rope = config.rope
    return yarn.ignored_settings(rope.params, file_architecture(config)) if rope is not None and rope.kind == "yarn" else ""


def export_rope_table(config: ModelConfig) -> RopeTable:
    """The RoPE table of the model's full context."""
    return rope_table(config.rope, config.rotary_head_dim, config.max_position_embeddings, config.max_position_embeddings)


def rope_scaling_keys(config: ModelConfig) -> dict[str, Value]:
    """RoPE scaling keys, without the architecture's prefix. Raises EffllmError for settings that GGUF cannot state."""
    rope, params = config.rope, config.rope.params
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(params["factor"])}
    if rope.kind == "yarn":
        if not params["truncate"] and config.family != gpt_oss.FAMILY:
            raise EffllmError("this model's yarn scaling has settings that a GGUF file cannot state", FOLDER_HINT)
        table = export_rope_table(config)
        keys = yarn.export_keys(params, table.attention_scaling, file_architecture(config))
        return {f"rope.scaling.{key}": value for key, value in keys.items()}
    if rope.kind == "longrope" and config.family in LONGROPE_FAMILIES:
        table = export_rope_table(config)
        keys = {} if config.family == "phi3" else {"rope.scaling.type": "longrope"}
        return {**keys, "rope.scaling.attn_factor": float(table.attention_scaling),
                "rope.scaling.original_context_length": int(params["original_max_position_embeddings"])}
    return {}


def rotary_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Divisors of the rotary frequencies by tensor name, float32 [rotary channels / 2]; empty for plain or linear scaling.

    Raises EffllmError for scaling that depends on the length.
    """
    rope = config.rope or PLACEHOLDER_ROPE
    pad = lambda divisors: step35.pad_rope_factors(divisors, config) if config.family == step35.FAMILY else divisors  # noqa: E731
    if config.family == gemma4.FAMILY:
        return {ROPE_FACTORS: gemma4.rope_factors(config)}
    if rope.kind in ("default", "linear", "yarn"):
        return {}
    params = rope.params
    if rope.kind == "longrope" and config.family in LONGROPE_FAMILIES:
        return {LONG_ROPE_FACTORS: np.array(params["long_factor"], "<f4"), SHORT_ROPE_FACTORS: np.array(params["short_factor"], "<f4")}
    if rope.kind == "longrope" and params["short_factor"] == params["long_factor"] and params["attention_factor"] == 1.0:
        return {ROPE_FACTORS: pad(np.array(params["long_factor"], "<f4"))}
    if rope.kind != "llama3":
        raise EffllmError(f"rotary positions of kind {rope.kind} depend on the length of the text, which a GGUF file cannot state",
                          FOLDER_HINT)
    rotary_dims = int(config.head_dim * rope.partial_rotary_factor)
    unscaled = rope.theta ** (-np.arange(0, rotary_dims, 2, np.float64) / rotary_dims)
    scaled = export_rope_table(config).inv_freq
    return {ROPE_FACTORS: pad((unscaled / scaled).astype("<f4"))}
