"""North Micro Vision's text part (Cohere Compass): the block of Cohere 2 with half-split RoPE; the config states positions by layer
type."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import MAX_LAYERS, MAX_POSITIONS, ModelConfig
from ..config_reader import ConfigError, Keys
from ..config_rope import GLOBAL, LOCAL, RopeConfig, rope_from_section
from . import cohere
from .cohere import cohere_config
from .qwen2 import layer_windows

LIKE = cohere
# `pooling` is of classifiers. transformers too ignores a rope_theta outside the sections, and a pattern without layer_types. The others are
# as in Cohere 2.
KEYS_HARMLESS = cohere.KEYS_HARMLESS | {"cache_implementation", "layer_switch", "pooling", "rope_theta", "sliding_window_pattern"}
REFUSED_UNLESS = {
    **{key: value for key, value in cohere.REFUSED_UNLESS.items()
       if key not in ("layer_types", "position_embedding_type", "sliding_window")},
    "use_qk_norm": False}
DEFAULT_WINDOW = 4096
SECTIONS_HINT = "this family has one section for each layer type, or null for none"


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", cohere.SIZES["num_hidden_layers"], high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else DEFAULT_WINDOW)
    windows = layer_windows(keys, window, (GLOBAL,) * layers)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        sections = keys.section("rope_parameters") or {}
        if keys.section("rope_scaling") is not None:
            raise ConfigError("config.json: rope_scaling is not supported for cohere_compass_text models", SECTIONS_HINT)
        original = keys.integer("original_max_position_embeddings", None, high=MAX_POSITIONS)
        kinds = tuple(LOCAL if window is not None else GLOBAL for window in windows)
        by_kind = {kind: _rope_of_kind(sections, kind, head_dim, positions, original) for kind in dict.fromkeys(kinds)}
        return tuple(by_kind[kind] for kind in kinds)

    # Logits are not scaled by default, unlike in Cohere 2.
    scale = keys.number("logit_scale", 1.0)
    return cohere_config(keys.with_values(logit_scale=scale), ropes=ropes, windows=windows)


def _rope_of_kind(sections: Mapping[str, object], kind: str, head_dim: int, positions: int,
                  original: int | None) -> RopeConfig | None:
    """RoPE settings of one layer type, None (no positions) if its section is null."""
    where = f"config.json: rotary positions of {kind}"
    if kind not in sections:
        raise ConfigError(f"config.json: rope_parameters has no section for {kind}", SECTIONS_HINT)
    section = sections[kind]
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{where} are no section", SECTIONS_HINT)
    return None if section is None else rope_from_section(Keys(section, where), head_dim, positions, 10_000.0, original)
