"""Resolving `--kv` for one model: its profile, what `auto` means, and refusing settings that break it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ... import UsageError
from ...offload.checkpoint import TensorStore
from ...offload.notes import Fallback
from ...quant.kv import codec, unpackable
from ..config import ModelConfig
from .kv_profile import Profile
from .kv_profile_file import load_profile

AUTO, UNPACKED = "auto", "16bit"
MAX_FLIPS = 0.05  # of top next tokens: beyond this a setting breaks the model


def profile_for(name: str, folder: Path | None, config: ModelConfig, store: TensorStore,
                add_notice: Callable[[str], None]) -> Profile | None:
    """The model's profile if the cache `name` needs one; its absence is reported to `add_notice`. Raises UsageError as `load_profile`."""
    if folder is None or (name != AUTO and not codec(name).is_packed):
        return None
    if not config.cache_kv_heads:
        add_notice(f"--kv {name}: this model has no keys and values, and its recurrent states are not quantized")
        return None
    profile = load_profile(folder, config, store)
    if profile is None and name == AUTO and (reason := unpackable(config.cache_kv_heads)):
        add_notice(f"--kv auto: {reason}; keys and values stay at {UNPACKED}")
    elif profile is None:
        consequence = f"keys and values stay at {UNPACKED}" if name == AUTO else "every head gets the same bits"
        message = f"--kv {name}: no profile of this model, {consequence}; effllm eval kv-profile records one"
        add_notice(Fallback(message) if name == AUTO else message)
    return profile


def resolve_auto(name: str, profile: Profile | None, add_notice: Callable[[str], None]) -> str:
    """The cache that `name` means: for auto, the bits that the profile's checks found good enough."""
    if name != AUTO:
        return name
    if profile is not None and profile.auto is None:
        why = "no setting that was validated preserves this model's output" if profile.checks else "this model's profile was not validated"
        add_notice(f"--kv auto: {why}, keys and values stay at {UNPACKED}")
    resolved = UNPACKED if profile is None or profile.auto is None else f"{profile.auto}bit"
    if resolved != UNPACKED:
        add_notice(f"--kv auto: {resolved} by this model's profile")
    return resolved


def refuse_broken(name: str, profile: Profile) -> None:
    """Raises UsageError, with the figure, for a packed cache that breaks the model according to its profile's checks."""
    kv = codec(name)
    kv = kv.mixed[1] if kv.policy else kv
    flips = profile.flips(profile.bits_for(kv.bits_k, kv.bits_v))
    if flips is not None and flips > MAX_FLIPS:
        raise UsageError(f"--kv {name} would change {100 * flips:.0f}% of this model's top next tokens, more than {MAX_FLIPS:.0%}",
                         "use more bits, or --force to try")
