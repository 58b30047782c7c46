"""Rotary positions in `config.json`, in either dialect: `rope_theta` and `rope_scaling`, or `rope_parameters`.

`rope.py` turns the result into frequencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from .config_reader import REQUIRED, ConfigError, Keys, show

MAX_POSITIONS = 2**27
# Rotary kinds -> the keys of the section that they use, beyond the kind itself and rope_theta.
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
# max_position_embeddings repeats what stands beside the section; mrope says which channels turn by which of a picture's positions
ROPE_HARMLESS = frozenset({"finetuned", "max_position_embeddings", "mrope_interleaved", "mrope_section", "xdrope_section"})
ROTATED_SHARE = "partial_rotary_factor"  # of a proportional table: the share of the pairs of channels that turn
QUERY_SCALING_BETA = "llama_4_scaling_beta"  # how much queries grow with their position, of families that read it
NO_ALIASES: Mapping[str, str] = MappingProxyType({})
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # types of layers that may have positions of their own


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions as the checkpoint states them; `rope.rope_table` turns them into frequencies. `params` by ROPE_KEYS, and GROWTH.
    `interleaved`: channels 2i and 2i + 1 are rotated together, not i and i + half. `backwards`: rotated by the negative
    angles."""

    theta: float
    kind: str
    params: Mapping[str, object]
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    backwards: bool = False


def rope_config(keys: Keys, head_dim: int, positions: int, theta: float = 10_000.0, partial: bool = False,
                aliases: Mapping[str, str] = NO_ALIASES, trained: int | None = None, share: float = 1.0,
                interleaved: bool = False) -> RopeConfig:
    """Rotary settings from either dialect; the older section wins where both are filled, and a value inside it over the one beside it, as
    in transformers. `theta` is the family's default; `partial`: it may rotate a part of each head, `share` where nothing says so;
    `aliases`: its other names of kinds; `trained`: positions that its models were trained with where nothing beside the section says so,
    whatever is in it; `interleaved` as in the result."""
    outer_theta = keys.number("rope_theta", theta, above=1.0)
    older, newer = keys.section("rope_scaling"), keys.section("rope_parameters")
    name = _section(keys.raw)
    original = keys.integer("original_max_position_embeddings", trained, high=MAX_POSITIONS)
    turned = keys.number("partial_rotary_factor", share) if partial else None
    inner = Keys({"partial_rotary_factor": turned, **(older or newer or {})}, f"config.json: {name}")
    return replace(rope_from_section(inner, head_dim, positions, outer_theta, original, partial, aliases), interleaved=interleaved)


def rope_from_section(inner: Keys, head_dim: int, positions: int, theta: float, original: int | None = None, partial: bool = False,
                      aliases: Mapping[str, str] = NO_ALIASES) -> RopeConfig:
    """Rotary settings from one section. `theta` and `original` (trained positions) are those stated beside it."""
    kind = inner.raw.get("rope_type") or inner.raw.get("type") or "default"
    if any(isinstance(value, dict) for value in inner.raw.values()):
        raise ConfigError(f"{inner.where} differs by layer type, which is not supported for this family")
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ConfigError(f"{inner.where} of type {show(kind)} is not supported", f"known: {', '.join(ROPE_KEYS)}")
    share = inner.number("partial_rotary_factor", 1.0)
    if kind == "proportional":  # pairs of channels that do not turn belong to the whole head all the same
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
    """Rotary positions of layers by whether they have a window, of families that have two sections in `rope_parameters`. The older
    dialect's `rope_scaling` is about layers without alone, and so is a `flat` section without types of layers, but for its theta. `thetas`:
    those of layers without a window, and with one, where their sections state none."""
    sections = keys.section("rope_parameters") or {}
    if flat and is_flat(sections):
        sections = {GLOBAL: sections, LOCAL: {name: value for name, value in sections.items() if name == "rope_theta"}}
    stray = sorted(sections.keys() - {GLOBAL, LOCAL})
    if stray or not all(isinstance(section, dict | None) for section in sections.values()):
        raise ConfigError("config.json: rope_parameters has no sections for full_attention and sliding_attention",
                          "this family has one section for each layer type")
    everywhere = {**(sections.get(GLOBAL) or {}), **(keys.section("rope_scaling") or {})}
    whole = rope_from_section(Keys(everywhere, f"config.json: rotary positions of {GLOBAL}"), head_dim, positions, thetas[0])
    local = rope_from_section(Keys(sections.get(LOCAL) or {}, f"config.json: rotary positions of {LOCAL}"), head_dim, positions, thetas[1])
    return tuple(whole if window is None else local for window in windows)


def ropes_by_layer_type(keys: Keys, kinds: Sequence[str], usual: Mapping[str, Mapping[str, object]], widths: Mapping[str, int] | int,
                        positions: int, theta: float = 10_000.0, partial: bool = False, unturned: str = "") -> tuple[RopeConfig | None,
                                                                                                                     ...]:
    """Rotary positions of layers by their kind, of families that have a section for each kind but `unturned`; `usual` where a config has
    none, `theta` where a section states none. `widths`: of heads, where they differ by kind. `partial`: not all of a head need turn."""
    refuse_outside_sections(keys)
    sections, made = keys.section("rope_parameters") or usual, {}
    for kind in sorted({*kinds} - {unturned}):
        section = sections.get(kind)
        if not isinstance(section, dict):
            raise ConfigError(f"config.json: rope_parameters has no section for {kind}", "this family has one section for each layer type")
        width = widths if isinstance(widths, int) else widths[kind]
        made[kind] = rope_from_section(Keys(section, f"config.json: rotary positions of {kind}"), width, positions, theta, partial=partial)
    return tuple(made.get(kind) for kind in kinds)


def refuse_outside_sections(keys: Keys) -> None:
    """Raises ConfigError for rotary settings beside per-layer-type sections, which transformers ignores."""
    stray = {"rope_scaling": keys.section("rope_scaling"), "rope_theta": keys.number("rope_theta", None),
             "original_max_position_embeddings": keys.integer("original_max_position_embeddings", None)}
    for name, value in stray.items():
        if value is not None:
            raise ConfigError(f"config.json: {name} = {show(value)} is not supported for {keys.text('model_type')} models",
                              "RoPE settings belong in rope_parameters, one section for each layer type")


def is_flat(sections: Mapping[str, object]) -> bool:
    """Is this rotary section one without per-layer-type subsections?"""
    return bool(sections) and not {GLOBAL, LOCAL} & sections.keys()


def unknown_rope_keys(raw: Mapping[str, object], ropes: Iterable[RopeConfig | None]) -> list[str]:
    """Keys of the rotary section that none of the model's `ropes` uses, with the section's name."""
    ropes = [rope for rope in ropes if rope is not None]
    if not ropes:
        return []
    name = _section(raw)
    section = raw.get(name)
    if not isinstance(section, dict):  # of a family that reads none
        return []
    nested = {f"{name}.{key}": value for key, value in section.items() if isinstance(value, dict)} or {name: section}
    read = (ROPE_KEYS[rope.kind].union(rope.params) for rope in ropes)
    known = ROPE_HARMLESS.union(*read, ("rope_type", "type", "rope_theta", "partial_rotary_factor"))
    return [f"{where}.{key}" for where, inner in nested.items() for key in sorted(inner.keys() - known)]


def _section(raw: Mapping[str, object]) -> str:
    """The section of the dialect that applies."""
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
