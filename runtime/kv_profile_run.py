"""From a model's path to a profile that is kept beside it: what `effllm eval kv-profile` does, and what `quantize` does at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .config import read_config
from .engine import Engine, open_engine
from .events import Notice, Progress
from .kv_profile import SECONDS, WINDOW, Profile, record
from .kv_profile_file import identity, profile_paths, save_profile
from .prepare import EngineOptions
from .text import Tokenizer

PRESETS = (8, 6, 5, 4, 3, 2)


def recorded(path: Path, text: str, seconds: float = SECONDS, threads: int | None = None,
             source: str = "the text") -> Iterator[Progress | Notice | Profile]:
    """Record the profile of the model at `path` and write it beside the weights; yields the Profile last. Raises as `record` does."""
    config = read_config(path)
    ctx = min(WINDOW, config.context_length)
    tokenizer, engine = Tokenizer.load(path, config), None
    for item in open_engine(path, EngineOptions(device="cpu", threads=threads, ctx=ctx, kv="32bit", chunk=-(-ctx // 128) * 128)):
        if isinstance(item, Engine):
            engine = item
        else:
            yield item
    try:
        for item in record(engine, tokenizer, text, identity(engine.model.store), seconds, source):
            if isinstance(item, Profile):
                save_profile(item, path)
            yield item
    finally:
        engine.close()


def report(profile: Profile, path: Path) -> dict[str, object]:
    """What `--json` prints. `presets`: mean bits -> ends of K's bits, ends of V's, noise over that of the same bits everywhere."""
    presets: dict[int, tuple[tuple[int, int], tuple[int, int], float]] = {}
    for mean in PRESETS:
        bits = profile.bits(mean)
        even = [[(mean, mean)] * len(layer) for layer in bits]
        k, v = zip(*(pair for layer in bits for pair in layer), strict=True)
        presets[mean] = ((min(k), max(k)), (min(v), max(v)), profile.cost(bits) / profile.cost(even))
    return {"file": str(profile_paths(path)[0]), "tokens": profile.tokens, "hash": f"{profile.hash:016x}", "presets": presets}
