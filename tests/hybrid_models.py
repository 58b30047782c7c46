"""Small random hybrid models (some layers recurrent) as fixtures, and operations on their engines."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES, Case
from family_sizes import ONE_GROUP
from saved_models import saved

from effllm.runtime.config import ModelConfig, read_config
from effllm.runtime.engine import Engine, open_engine, open_prepared
from effllm.runtime.prepare import EngineOptions, prepare_with
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.source import open_store

CTX = 640
IDS = np.random.default_rng(5).integers(0, 300, CTX).tolist()
GREEDY = SamplerSettings(temperature=0)
# Heads of a width that packed caches support, matrices with a partial group, and weights that give stable answers.
CALM = {"head_dim": 64, "initializer_range": 0.08, "max_position_embeddings": CTX, "vocab_size": 300}
# One layer has a KV cache and three a recurrent state; in LFM3 two of four have a KV cache, one with a window; in Falcon H1 all four have
# both; in Mamba and RWKV 7 none has a KV cache.
MODELS = {"qwen3_5_text": Case("qwen3_5_text", {**CASES["qwen3_5_text"].changes, **CALM, "attention_bias": False}),
          "granitemoehybrid": Case("granitemoehybrid", {
              **CASES["granitemoehybrid, state spaces"].changes, **CALM, "tie_word_embeddings": False,
              "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
          "nemotron_h": Case("nemotron_h", {
              **CASES["nemotron_h"].changes, **CALM, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp"]}),
          "nemotron_h, experts": Case("nemotron_h", {
              **CASES["nemotron_h, experts"].changes, **CALM, "layers_block_type": ["mamba", "moe", "mamba", "attention", "mamba", "moe"]}),
          "nemotron_h, experts of fewer numbers": Case("nemotron_h", {
              **CASES["nemotron_h, experts of fewer numbers"].changes, **CALM,
              "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe"]}),
          "falcon_h1": Case("falcon_h1", {**CASES["falcon_h1"].changes, **CALM, "num_hidden_layers": 4}),
          "olmo_hybrid": Case("olmo_hybrid", {**CASES["olmo_hybrid"].changes, **CALM, "initializer_range": 0.04}),
          "kimi_linear": Case("kimi_linear", {
              **CASES["kimi_linear"].changes, **CALM, **ONE_GROUP, "num_hidden_layers": 4, "kv_lora_rank": 112, "initializer_range": 0.05,
              "num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": [
                  "linear_attention", "full_attention", "linear_attention", "linear_attention"]}),
          "bailing_hybrid": Case("bailing_hybrid", {
              **CASES["bailing_hybrid"].changes, **CALM, **ONE_GROUP, "num_hidden_layers": 4, "kv_lora_rank": 112,
              "initializer_range": 0.05, "num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": [
                  "linear_attention", "full_attention", "linear_attention", "linear_attention"]}),
          "minimax": Case("minimax", {**CASES["minimax"].changes, **CALM, "num_local_experts": 3, "layer_types": [
              "linear_attention", "full_attention", "linear_attention", "linear_attention"]}),
          "mamba2": Case("mamba2", {**CASES["mamba2"].changes, **CALM, "hidden_size": 128, "expand": 2, "num_heads": 4}),
          "jamba": Case("jamba", {**CASES["jamba"].changes, **CALM, "num_hidden_layers": 4, "attn_layer_period": 4, "num_experts": 3,
                                  "hidden_size": 256}),
          "mamba": Case("mamba", {**CASES["mamba"].changes, **CALM, "hidden_size": 128, "intermediate_size": 256}),
          "rwkv7": Case("rwkv7", {**CALM, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256}),
          "lfm2": Case("lfm2", {**CALM, "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
          "lfm3": Case("lfm3", {**CALM, "num_hidden_layers": 4, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
                                "sliding_window": 100, "eos_token_id": 7, "bos_token_id": 1})}
KINDS = ("raw", "4 bits", "4 bits, packed cache", "packed cache")
PAIRS = ("4 bits", "packed cache")  # of which the others have both halves


# Run only with the slow tests: other models have the same kind of state.
SLOW_MODELS = ("nemotron_h", "nemotron_h, experts of fewer numbers", "bailing_hybrid", "minimax", "mamba2", "jamba", "rwkv7", "lfm3")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW_MODELS else ()) for name in MODELS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_folder = tmp_path_factory.mktemp("hybrid") / request.param
    saved(MODELS[request.param], model_folder)
    return model_folder


@pytest.fixture(scope="module")
def paged(folder: Path) -> Path:
    """One with an attention layer."""
    if not read_config(folder).attention_layers:
        pytest.skip("no layer has pages")
    return folder


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same at 4 bits."""
    return quantized(folder, tmp_path_factory.mktemp("small") / "4bit")


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.slow if kind in PAIRS else ()) for kind in KINDS])
def engine(request: pytest.FixtureRequest, folder: Path, small: Path) -> Iterator[Engine]:
    opened_engine = of_kind(request.param, folder, small)
    yield opened_engine
    opened_engine.close()


def quantized(folder: Path, out: Path) -> Path:
    run(folder, out, options("4bit"))
    return out


def opened(folder: Path, **options_given: object) -> Engine:
    return list(open_engine(folder, EngineOptions(device="cpu", **{"ctx": CTX, "chunk": 128, "threads": 2, **options_given})))[-1]


def of_kind(kind: str, folder: Path, small: Path) -> Engine:
    """An engine of one of KINDS, for the model or the same at 4 bits."""
    return opened(small if "4 bits" in kind else folder, **({"kv": "4bit", "kv_window": 32} if "packed" in kind else {}))


def read(engine: Engine, ids: list[int]) -> np.ndarray:
    """The logits after a prompt."""
    for _ in engine.prefill(ids):
        continue
    return engine._logits.copy()


def read_afresh(engine: Engine, ids: list[int]) -> np.ndarray:
    """`read` as the first prompt."""
    engine.cache.truncate(0)
    engine.reset()
    return read(engine, ids)


def one_by_one(engine: Engine, ids: list[int]) -> np.ndarray:
    """The logits after each of `ids`, one pass each."""
    return np.stack([engine.forward_logits([token])[0].copy() for token in ids])


def opened_as(folder: Path, config: ModelConfig) -> Engine:
    """An engine for a model with changes to its folder's config."""
    engine_options = EngineOptions(kv="32bit", device="cpu", ctx=CTX, chunk=128)
    return list(open_prepared(partial(prepare_with, folder, config, open_store(folder), engine_options), ("raw", "mixers")))[-1]


def answer(engine: Engine, tokens: int) -> list[int]:
    return [step.token for step in engine.generate(Sampler(GREEDY, engine.config.vocab_size), tokens, frozenset())]
