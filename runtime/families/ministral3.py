"""Ministral 3, text: Mistral without a window, with YaRN, and position-dependent scaling of queries.

A query at position p is scaled by 1 + beta ln(1 + p // n), with n the length before extension: 1 for the first n tokens, then growing in
steps of n. The rotary table of queries includes the factor (`rope.py`). Multimodal checkpoints have the same tensors under another prefix.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import MAX_POSITIONS, QUERY_SCALING_BETA, RopeConfig, rope_from_section
from . import mistral

LIKE = mistral
YARN = {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
        "mscale_all_dim": 1.0, QUERY_SCALING_BETA: 0.1}  # if the config has no rope_parameters


def config(keys: Keys) -> ModelConfig:
    layers, window = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("sliding_window", None)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        scaling, parameters = keys.section("rope_scaling"), keys.section("rope_parameters")
        section = scaling or (YARN if keys.raw.get("rope_parameters") is None else parameters or {})
        inner = Keys(section, f"config.json: {'rope_scaling' if scaling else 'rope_parameters'}")
        original = keys.integer("original_max_position_embeddings", None, high=MAX_POSITIONS)
        rope = rope_from_section(inner, head_dim, positions, keys.number("rope_theta", 10_000.0, above=1.0), original)
        return (with_query_scaling(rope, inner),) * layers

    base = Defaults(max_position_embeddings=262_144, num_key_value_heads=8, head_dim=128, bos=1, eos=(2,), norm_eps=1e-5)
    return decoder_config(keys, base, ropes, windows=(window,) * layers)


def with_query_scaling(rope: RopeConfig, section: Keys) -> RopeConfig:
    """`rope` with the query scaling that `section` states. Raises ConfigError."""
    length = "original_max_position_embeddings"
    if section.raw.get(QUERY_SCALING_BETA) == 0:
        return replace(rope, params={**rope.params, QUERY_SCALING_BETA: 0.0})
    original = rope.params.get(length) or section.integer(length, high=MAX_POSITIONS)
    return replace(rope, params={**rope.params, length: original, QUERY_SCALING_BETA: section.number(QUERY_SCALING_BETA)})
