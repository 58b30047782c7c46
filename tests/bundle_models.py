"""Models with neuron bundles for tests: created once, opened in memory or with a window, and the logits that every way of running them must
give."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from family_models import Case
from saved_models import saved
from streamed_models import streams

from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.convert import Converted
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sparse.neuron_bundles import NeuronWindows, bundle_places
from effllm.runtime.tensors import check_tensors

RELU = {"hidden_act": "relu", "hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_key_value_heads": 2}
CASES = {
    "llama, bf16": Case("llama", RELU, dtype="bfloat16"),
    "llama, f32, biases": Case("llama", {**RELU, "mlp_bias": True, "attention_bias": True}),
    "llama, f16": Case("llama", RELU, dtype="float16"),
    "llama, long sums": Case("llama", {**RELU, "intermediate_size": 4160, "num_hidden_layers": 1}, dtype="bfloat16"),
    "olmo2": Case("olmo2", {"hidden_act": "relu", "hidden_size": 64, "intermediate_size": 128}),
    "granite": Case("granite", {**RELU, "residual_multiplier": 0.22}),
    "arcee": Case("arcee", {"hidden_size": 64, "intermediate_size": 128}),
    "opt": Case("opt", {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}, dtype="bfloat16"),
}


def bundled(folder: Path, out: Path, **more: object) -> tuple[Converted, list[str]]:
    events = list(bundle(folder, out, **more))
    return events[-1], [event.text for event in events if isinstance(event, Notice)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A model as published, and bundled; created once."""

    @cache
    def made(name: str) -> tuple[Path, Path]:
        base = tmp_path_factory.mktemp("bundles")
        saved(CASES[name], base / "model")
        bundled(base / "model", base / "bundled")
        return base / "model", base / "bundled"

    return made


def logits(engine: Engine, prompt: int = 150, answer: int = 12) -> np.ndarray:
    """Logits of a prompt in chunks, then token by token, then a few at once, a prompt again, and one more token."""
    ids = np.random.default_rng(7).integers(0, engine.config.vocab_size, prompt + answer + 40).tolist()
    engine.reset()
    rows = [logits_row.copy() for _, logits_row in engine.score(ids[:prompt])]
    rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(prompt, prompt + answer)]
    at = prompt + answer
    for count in (7, 20, 1):
        rows.append(engine.forward_logits(ids[at : at + count]).copy())
        at += count
    return np.concatenate(rows)


def resident(folder: Path, **asked: object) -> Engine:
    engine = list(open_engine(folder, EngineOptions(device="cpu", ctx=256, **asked)))[-1]
    assert engine.model.pager.resident
    return engine


def windowed(folder: Path, slots: int, keep: int = 1, direct: bool = True, **asked: object) -> Engine:
    """`slots` units of every layer in memory; of everything else every `keep`-th part."""
    options = EngineOptions(device="cpu", ctx=256, **asked)
    pager = streams(folder, options, keep, direct=direct)
    prepared = prepare(folder, options)
    places = bundle_places(check_tensors(prepared.config, prepared.store, prepared.container), prepared.store)
    windows = NeuronWindows(places, tuple(min(slots, bundle_place.units) for bundle_place in places))
    engine = Engine(replace(prepared, streaming=replace(pager, windows=windows)))
    for _ in engine.model.load():
        continue
    return engine


def found(engine: Engine) -> np.ndarray:
    try:
        return logits(engine)
    finally:
        engine.close()
