"""OLMo 3: OLMo 2 with a sliding window in three of four layers, or as listed, and RoPE scaling only in the others."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import GLOBAL, LOCAL, RopeConfig, is_flat, ropes_by_window
from . import olmo2
from .qwen2 import layer_windows

LIKE = olmo2
KEYS_HARMLESS = frozenset({"original_max_position_embeddings"})  # the sections of rope_parameters have their own
REFUSED_UNLESS = {"clip_qkv": None, "mlp_bias": False, "use_sliding_window": True}
THETA = 500_000.0
FULL_ATTENTION_INTERVAL = 4  # the last layer of every 4 has full attention, without layer_types


def config(keys: Keys) -> ModelConfig:
    bias, layers = keys.flag("attention_bias", False), keys.integer("num_hidden_layers", high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 4096)
    windows = layer_windows(keys, window, [LOCAL if (layer + 1) % FULL_ATTENTION_INTERVAL else GLOBAL for layer in range(layers)])

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return ropes_by_window(keys, head_dim, positions, (_theta(keys, windows), THETA), windows, flat=True)

    base = Defaults(max_position_embeddings=2048, eos=(50_279,), norm_eps=1e-5)
    config = decoder_config(keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_full_width=True)
    if not is_flat(keys.section("rope_parameters") or {}) or config.ropes[windows.index(None) if None in windows else 0].kind == "default":
        return config
    warning = "rope_parameters has no sections by layer type: only layers without a window are scaled, as in the published models"
    return replace(config, warnings=(*config.warnings, warning))


def _theta(keys: Keys, windows: tuple[int | None, ...]) -> float:
    """The rope_theta at the top level. Programs disagree whether layers with a window use it, so a value other than that of the published
    models is refused unless their section states its own."""
    stated, sections = keys.number("rope_theta", THETA, above=1.0), keys.section("rope_parameters") or {}
    local = sections.get(LOCAL)
    if stated != THETA and set(windows) != {None} and not (isinstance(local, dict) and local.get("rope_theta") is not None):
        raise ConfigError(f"config.json: rope_theta = {stated:g} is not supported for olmo3 models beside none of layers with a window",
                          "state both in rope_parameters, which has two sections in this family, by the type of the layer")
    return stated
