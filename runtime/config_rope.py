"""Rotary positions in `config.json`, in either dialect: `rope_theta` and `rope_scaling`, or `rope_parameters`.

`rope.py` turns the result into frequencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from .config_reader import REQUIRED, ConfigError, Keys, show

MAX_POSITIONS = 2**27
# rope_type -> the keys of the section that it uses, besides rope_type and rope_theta.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
                       "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}),
    "proportional": frozenset({"factor"}),
}
# max_position_embeddings repeats the key outside the section; mrope sections assign channels to an image's position axes.
ROPE_HARMLESS = frozenset({"finetuned", "max_position_embeddings", "mrope_interleaved", "mrope_section", "xdrope_section"})
ROTATED_SHARE = "partial_rotary_factor"  # of a proportional table: share of the channel pairs that are rotated
QUERY_SCALING_BETA = "llama_4_scaling_beta"  # factor of position-dependent query scaling, in families that read it
NO_ALIASES: Mapping[str, str] = MappingProxyType({})
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # layer types


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions as the checkpoint states them; `rope.rope_table` computes the frequencies."""

    theta: float  # base of the frequencies
    kind: str  # rope_type, a key of ROPE_KEYS
    params: Mapping[str, object]  # the keys that ROPE_KEYS lists, and QUERY_SCALING_BETA
    partial_rotary_factor: float = 1.0  # share of a head that is rotated
    interleaved: bool = False  # channels 2i and 2i + 1 are rotated together, not i and i + half
    backwards: bool = False  # rotated by the negative angles


def rope_config(keys: Keys, head_dim: int, positions: int, theta: float = 10_000.0, partial: bool = False,
                aliases: Mapping[str, str] = NO_ALIASES, trained: int | None = None, share: float = 1.0,
                interleaved: bool = False) -> RopeConfig:
    """RoPE settings from either dialect. As in transformers, rope_scaling takes precedence over rope_parameters, and a key within the
    section over the same key outside. Raises ConfigError.

    theta: default of rope_theta.
    partial: whether a part of each head may be rotated; `share` is its default.
    aliases: the family's other names of rope types.
    trained: default of original_max_position_embeddings outside the section; it takes precedence over the section's.
    interleaved: as in RopeConfig.
    """
    outer_theta = keys.number("rope_theta", theta, above=1.0)
    older, newer = keys.section("rope_scaling"), keys.section("rope_parameters")
    name = _section(keys.raw)
    original = keys.integer("original_max_position_embeddings", trained, high=MAX_POSITIONS)
    rotary_factor = keys.number("partial_rotary_factor", share) if partial else None
    inner = Keys({"partial_rotary_factor": rotary_factor, **(older or newer or {})}, f"config.json: {name}")
    return replace(rope_from_section(inner, head_dim, positions, outer_theta, original, partial, aliases), interleaved=interleaved)


def rope_from_section(inner: Keys, head_dim: int, positions: int, theta: float, original: int | None = None, partial: bool = False,
                      aliases: Mapping[str, str] = NO_ALIASES) -> RopeConfig:
    """RoPE settings from one section. `theta` and `original` (trained positions) are those outside it. Raises ConfigError."""
    kind = inner.raw.get("rope_type") or inner.raw.get("type") or "default"
    if any(isinstance(value, dict) for value in inner.raw.values()):
        raise ConfigError(f"{inner.where} differs by layer type, which is not supported for this family")
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ConfigError(f"{inner.where} of type {show(kind)} is not supported", f"known: {', '.join(ROPE_KEYS)}")
    share = inner.number("partial_rotary_factor", 1.0)
    if kind == "proportional":  # the table spans the whole head; pairs beyond the share have frequency 0
        if share > 1.0:
            raise ConfigError(f"{inner.where}.partial_rotary_factor = {show(share)} is not supported", "it must be at most 1")
        return RopeConfig(inner.number("rope_theta", theta, above=1.0), kind, {"factor": inner.number("factor", 1.0), ROTATED_SHARE: share})
    if share != 1.0 and not partial:
        raise ConfigError(f"{inner.where}.partial_rotary_factor = {show(share)} is not supported", "this family rotates whole heads")
    rotary = int(head_dim * share)
    if not 2 <= rotary <= head_dim or rotary % 2:
        raise ConfigError(f"{inner.where}: {show(share)} of a head dimension of {head_dim} cannot be rotated",
                          "the rotated part must be an even number of channels")
    original = original or inner.integer("original_max_position_embeddings", positions, high=MAX_POSITIONS)
    return RopeConfig(inner.number("rope_theta", theta, above=1.0), kind, _rope_params(inner, kind, rotary, positions, original), share)


def ropes_by_window(keys: Keys, head_dim: int, positions: int, thetas: tuple[float, float], windows: Iterable[int | None],
                    flat: bool = False) -> tuple[RopeConfig, ...]:
    """RoPE settings by layer, in families with one section for full attention and one for sliding windows. Raises ConfigError.

    thetas: defaults of rope_theta for layers without a window, and with one.
    windows: by layer.
    flat: a section without layer types is allowed; it applies to full attention, and its rope_theta to all layers. The older dialect's
    rope_scaling applies to full attention too.
    """
    sections = keys.section("rope_parameters") or {}
    if flat and is_flat(sections):
        sections = {GLOBAL: sections, LOCAL: {name: value for name, value in sections.items() if name == "rope_theta"}}
    stray = sorted(sections.keys() - {GLOBAL, LOCAL})
    if stray or not all(isinstance(section, dict | None) for section in sections.values()):
        raise ConfigError("config.json: rope_parameters has no sections for full_attention and sliding_attention",
                          "this family has one section for each layer type")
    full_section = {**(sections.get(GLOBAL) or {}), **(keys.section("rope_scaling") or {})}
    full = rope_from_section(Keys(full_section, f"config.json: rotary positions of {GLOBAL}"), head_dim, positions, thetas[0])
    local = rope_from_section(Keys(sections.get(LOCAL) or {}, f"config.json: rotary positions of {LOCAL}"), head_dim, positions, thetas[1])
    return tuple(full if window is None else local for window in windows)


def ropes_by_layer_type(keys: Keys, layer_types: Sequence[str], defaults: Mapping[str, Mapping[str, object]],
                        head_dims: Mapping[str, int] | int, positions: int, theta: float = 10_000.0, partial: bool = False,
                        nope_type: str = "") -> tuple[RopeConfig | None, ...]:
    """RoPE settings by layer, in families with one section for each layer type. Raises ConfigError.

    layer_types: of each layer.
    defaults: default sections by layer type.
    head_dims: head dimension, or one for each layer type.
    theta: default of rope_theta.
    partial: whether a part of each head may be rotated.
    nope_type: a layer type without rotary positions.
    """
    refuse_outside_sections(keys)
    sections, ropes = keys.section("rope_parameters") or defaults, {}
    for layer_type in sorted({*layer_types} - {nope_type}):
        section = sections.get(layer_type)
        if not isinstance(section, dict):
            raise ConfigError(f"config.json: rope_parameters has no section for {layer_type}",
                              "this family has one section for each layer type")
        head_dim = head_dims if isinstance(head_dims, int) else head_dims[layer_type]
        where = f"config.json: rotary positions of {layer_type}"
        ropes[layer_type] = rope_from_section(Keys(section, where), head_dim, positions, theta, partial=partial)
    return tuple(ropes.get(layer_type) for layer_type in layer_types)


def refuse_outside_sections(keys: Keys) -> None:
    """Raises ConfigError for RoPE keys outside the sections by layer type, which transformers ignores."""
    stray = {"rope_scaling": keys.section("rope_scaling"), "rope_theta": keys.number("rope_theta", None),
             "original_max_position_embeddings": keys.integer("original_max_position_embeddings", None)}
    for name, value in stray.items():
        if value is not None:
            raise ConfigError(f"config.json: {name} = {show(value)} is not supported for {keys.text('model_type')} models",
                              "RoPE settings belong in rope_parameters, one section for each layer type")


def is_flat(sections: Mapping[str, object]) -> bool:
    """Whether a RoPE section has no sections by layer type within it."""
    return bool(sections) and not {GLOBAL, LOCAL} & sections.keys()


def unknown_rope_keys(raw: Mapping[str, object], ropes: Iterable[RopeConfig | None]) -> list[str]:
    """Keys of the RoPE section that none of the model's `ropes` uses, as section.key."""
    ropes = [rope for rope in ropes if rope is not None]
    if not ropes:
        return []
    name = _section(raw)
    section = raw.get(name)
    if not isinstance(section, dict):  # the family reads none
        return []
    nested = {f"{name}.{key}": value for key, value in section.items() if isinstance(value, dict)} or {name: section}
    read = (ROPE_KEYS[rope.kind].union(rope.params) for rope in ropes)
    known = ROPE_HARMLESS.union(*read, ("rope_type", "type", "rope_theta", "partial_rotary_factor"))
    return [f"{where}.{key}" for where, inner in nested.items() for key in sorted(inner.keys() - known)]


def _section(raw: Mapping[str, object]) -> str:
    """The name of the section that applies."""
    return "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"


def _rope_params(inner: Keys, kind: str, rotary: int, positions: int, original: int) -> dict[str, object]:
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": inner.number("factor")}
    params: dict[str, object] = {"original_max_position_embeddings": original}
    params["factor"] = inner.number("factor", REQUIRED if kind == "llama3" else positions / original)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if low > high:  # Llama 4 states one number for both: nothing is blended
            raise ConfigError(f"{inner.where}: low_freq_factor {low:g} is above high_freq_factor {high:g}")
        return params | {"low_freq_factor": low, "high_freq_factor": high}
    params["attention_factor"] = inner.number("attention_factor", None)
    if kind == "longrope":
        if original < 2:
            raise ConfigError(f"{inner.where}: original_max_position_embeddings is {original}, expected at least 2")
        return params | {name: inner.numbers(name, rotary // 2) for name in ("short_factor", "long_factor")}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", None), ("mscale_all_dim", None)):
        # 0 stands for "not set" here, as in transformers
        params[name] = default if inner.raw.get(name) == 0 else inner.number(name, default)
    return params | {"truncate": inner.flag("truncate", True)}
