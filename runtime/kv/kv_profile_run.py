"""Recording a model's KV profile and storing it: `effllm eval kv-profile`, and the last step of `quantize`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ... import UsageError
from ...kernels.blas import one_thread
from ...kernels.layout import PAGE
from ...quant.kv import codec
from ..config import read_config
from ..engine import Engine, open_prepared
from ..events import Notice, Progress
from ..measuring.evaluate import windows
from ..planning.needed_kernels import folder_kinds
from ..prepare import EngineOptions, Prepared, prepare_with
from ..source import open_weights
from ..tokenizer import Tokenizer
from .kv_profile import Profile
from .kv_profile_file import identity_of, profile_paths, refuse_unwritable, save_profile
from .kv_recording import DEFAULT_SECONDS, WINDOW, record
from .kv_validation import CANDIDATE_BITS, CHECKED_LAST_BITS, MIN_SCORED, held_out_window, validate_auto

PRESETS = (8, 6, 5, 4, 3, 2)
RECORDING_KV = "8bit"  # of the recording engine: room for any packed cache
RECORDING_SHARE = 0.6  # of the time; the rest is for validation


def record_profile(path: Path, text: str, seconds: float = DEFAULT_SECONDS, threads: int | None = None,
                   source: str = "the text") -> Iterator[Progress | Notice | Profile]:
    """Record the profile of the model at `path` and write it beside the weights; yields the Profile last. Raises as `record`."""
    config = read_config(path)
    if not config.cache_kv_heads:
        raise UsageError("this model has no keys and values to profile",
                         "its recurrent states take the same memory at any length")
    if config.compressed_attention is not None or config.dynamic_mask:
        why = "have a score bias" if config.dynamic_mask else "are compressed over several tokens"
        raise UsageError(f"keys of this model {why} and are never packed", "a profile only helps caches that can be packed")
    try:
        codec(RECORDING_KV).layers(config.cache_kv_heads)
    except UsageError as error:  # the usual hint, other bits, does not apply here
        raise UsageError(error.message, "a profile only helps caches that can be packed") from error
    refuse_unwritable(path)
    # For sparse attention, limit the context to where it selects everything.
    ctx = min(WINDOW, config.context_length, *(() if config.indexer is None else (config.indexer.shape.dense_tokens,)))
    tokenizer, weights, engine = Tokenizer.load(path, config), identity_of(path), None
    # Exact products: the 8-bit activations of low-bit weights round differently after any change, which on fable at 4 bits looks like a
    # hundred times the damage of a 4-bit cache. Validation should see only the cache.
    options = EngineOptions(device="cpu", threads=threads, ctx=ctx, kv=RECORDING_KV, chunk=-(-ctx // PAGE) * PAGE, exact=True)
    for item in open_prepared(lambda: without_profile(path, options), folder_kinds(path, options)):
        if isinstance(item, Engine):
            engine = item
        else:
            yield item
    try:
        until = time.monotonic() + seconds
        token_windows = [window for window in windows(tokenizer, text, ctx, source) if len(window) > engine.first_reader() + 1]
        held_out = held_out_window(token_windows, engine.first_reader())
        if token_windows and held_out is None:
            room = ctx - engine.first_reader()
            why = (f"windows of {ctx} tokens, as long as the model's context, have {room} that read a packed page, of {MIN_SCORED} wanted"
                   if room < MIN_SCORED else
                   f"{source} has no second window of {MIN_SCORED + engine.first_reader()} tokens (a longer --text)")
            yield Notice(f"nothing can be validated, so --kv auto will not pack the cache: {why}")
        share = 1.0 if held_out is None else RECORDING_SHARE
        with one_thread():  # BLAS products of a few million multiplications, between passes of our own threads
            for item in record(engine, tokenizer, text, weights, share * seconds, source, held_back=held_out):
                if not isinstance(item, Profile):
                    yield item
        for event in (item,) if held_out is None else validate_auto(engine, item, token_windows[held_out], until):
            if isinstance(event, Profile):
                save_profile(event, path)
            yield event
    finally:
        engine.close()


def without_profile(path: Path, options: EngineOptions) -> Prepared:
    """Options with room for packed caches, ignoring an existing profile: it is about to be replaced."""
    store, container = open_weights(path)
    return prepare_with(None, read_config(path), store, options, container)


def profile_report(profile: Profile, path: Path) -> dict[str, object]:
    """The `--json` output.

    presets: mean bits -> (range of K's bits, range of V's bits, cost relative to uniform bits, None if no packed page was read)
    checks: the profile's, each with its mean bits
    """
    presets: dict[int, tuple[tuple[int, int], tuple[int, int], float | None]] = {}
    for mean in PRESETS:
        bits = profile.bits(mean)
        uniform = [[(mean, mean)] * len(layer) for layer in bits]
        k, v = zip(*(pair for layer in bits for pair in layer), strict=True)
        uniform_cost = profile.cost(uniform)
        presets[mean] = ((min(k), max(k)), (min(v), max(v)), profile.cost(bits) / uniform_cost if uniform_cost else None)
    costs = {mean: profile.cost(profile.bits(mean)) for mean in (CHECKED_LAST_BITS, *CANDIDATE_BITS)}
    return {"file": str(profile_paths(path)[0]), "tokens": profile.tokens, "hash": f"{profile.hash:016x}", "presets": presets,
            "ends": list(profile.ends), "auto": profile.auto,
            "checks": [{"bits": min(costs, key=lambda mean: abs(costs[mean] - cost)), "cost": cost, "kld": kld, "flips": flips}
                       for cost, kld, flips in profile.checks]}
