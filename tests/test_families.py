"""Every family against transformers, which defines what a checkpoint means: tiny random models, float32, exact KV cache.

Weights are drawn wide (and norms and biases redrawn) so that logits differ clearly between tokens and no bias is zero. Logits are held
to 1e-4 of the largest logit; greedy tokens are equal. Prompt lengths lie around page edges (64 sinks, then pages of 128), windows are
shorter than the prompts, and the longest prompts and the decode steps behind them meet sealed pages. transformers stretches two rotary
kinds anew as a text grows; effllm fixes them for its context, so the oracle is given the frequencies of that context.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from bit_exactness import assert_last_layers_narrow_exactly
from family_models import CASES, CONTEXT, Case, assert_close, oracle, rotary_of, share_angles, text, written
from safetensors.torch import load_file, save_file
from saved_models import saved
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.families import EMBEDDING_FAMILIES, FAMILIES, MODEL_TYPE_ALIASES
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.tensors import check_tensors
from effllm.runtime.workspace_dims import dims

LENGTHS = (1, 5, 63, 64, 65, 191, 192, 193, 340)
DECODE_FROM = (5, 180, 310)  # steps cross the edges at 64 and 192, and the sealing of the first page at 320
STEPS = 40
LONGEST = max(*LENGTHS, DECODE_FROM[-1] + STEPS)


def fix_rope(model: PreTrainedModel, ctx: int) -> None:
    """Hold the frequencies at those of a context of `ctx`, whatever the length of a text."""
    rotary = rotary_of(model)
    if rotary is not None and rotary.rope_type in ("dynamic", "longrope"):
        rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config, torch.device("cpu"), seq_len=ctx)
        rotary.rope_type = "default"


def opened(folder: Path, **options: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=CONTEXT, strict=True, chunk=128, exact=True, **options))
    assert isinstance(engine, Engine) and engine.n_ctx == CONTEXT
    return engine


# Of each family the first case, and of those that most people run all but those inside a model that sees.
OFTEN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi3", "deepseek_v3")
FIRST = {*{case.family: name for name, case in reversed(CASES.items())}.values()}
FIRST |= {name for name, case in CASES.items() if case.family in OFTEN and not (case.images or case.inside)}


class Pair(NamedTuple):
    """Ours, transformers', the longest text and what transformers says of it: float64[T, V]."""

    engine: Engine
    model: PreTrainedModel
    ids: list[int]
    logits: np.ndarray


@pytest.fixture(params=[pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in CASES], scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One case. No family looks ahead, so what transformers says of the longest text is what it says of all that the text begins with."""
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    model = written(case, folder)
    fix_rope(model, CONTEXT)
    # 512 positions are more than the dynamic model was trained for, which is what it is there to show.
    engine = opened(folder, force=model.config.get_text_config().max_position_embeddings < CONTEXT)
    share_angles(engine, model)
    ids = text(model, LONGEST)
    yield Pair(engine, model, ids, oracle(model, ids))
    engine.close()


def test_logits_of_prompts(pair: Pair) -> None:
    engine, model, longest, expected = pair
    for length in LENGTHS:
        ids = longest[:length]
        scored = [(start, logits.copy()) for start, logits in engine.score(ids)]
        assert [start for start, _ in scored] == np.cumsum([0] + [len(logits) for _, logits in scored[:-1]]).tolist()
        assert_close(np.concatenate([logits for _, logits in scored]), expected[:length], partial(oracle, model, ids, torch.float32))


@pytest.mark.slow
def test_greedy_tokens(pair: Pair) -> None:
    """Over the sealing of a page; what single steps have of other prompts is compared below."""
    engine, model, *_ = pair
    ids = text(model, length := DECODE_FROM[-1])
    list(engine.prefill(ids))
    sampler = Sampler(SamplerSettings(temperature=0), engine.config.vocab_size)
    steps = list(engine.generate(sampler, STEPS, frozenset()))
    tokens = [step.token for step in steps]
    assert len(tokens) == STEPS and steps[-1].finish == "length"
    # Each token is the best one after those before it: by induction the greedy text is the same.
    assert oracle(model, ids + tokens)[length - 1 : -1].argmax(-1).tolist() == tokens


def test_a_prompt_ends_as_if_all_of_it_went_through_every_layer(pair: Pair) -> None:
    assert_last_layers_narrow_exactly(pair.engine, pair.ids[: DECODE_FROM[-1] + 3])


def test_logits_of_single_steps(pair: Pair) -> None:
    engine, model, longest, expected = pair
    for length in DECODE_FROM:
        ids = longest[: length + STEPS]
        list(engine.prefill(ids[:length]))
        steps = [engine.forward_logits([token])[0].copy() for token in ids[length:]]
        assert_close(np.stack(steps), expected[length : length + STEPS], lambda ids=ids: oracle(model, ids, torch.float32)[-STEPS:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3, longrope over half a head", "gemma", "gemma2", "gemma3", "olmo2", "olmo3", "ministral3",
                                  "seed_oss", "smollm3", "granite", "opt", "mixtral", "qwen3_moe, bfloat16", "olmoe", "gpt_oss",
                                  "granitemoe", "granitemoehybrid", "qwen2_moe", "glm4_moe", "dots1, no windows, bfloat16", "starcoder2",
                                  "exaone4", "arcee", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "deepseek_v2", "deepseek_v3",
                                  "glm4_moe_lite", "mistral4", "mistral_large4, all seen, bfloat16", "youtu", "qwen3_5_text",
                                  "qwen3_5_text, other layers", "qwen3_5_moe_text", "qwen3_next", "llama4_text", "lfm2",
                                  "lfm2, other taps, bfloat16", "lfm2_moe", "granitemoehybrid, state spaces", "nemotron_h",
                                  "nemotron_h, experts", "nemotron_h, experts of fewer numbers", "bamba", "falcon_h1",
                                  "falcon_h1, norms, tied, bfloat16",
                                  "cohere, norms of every head", "hunyuan_v1_moe", "nemotron", "stablelm", "apertus",
                                  "granitemoehybrid, experts, bfloat16", "gemma4_text", "gemma4_text, keys as values",
                                  "gemma4_text, mixture", "gemma3n_text", "gemma3n_text, two streams, windows over pages, bfloat16",
                                  "afmoe", "gpt_neox", "phi", "stablelm, side by side", "olmo", "phimoe", "olmo_hybrid", "granite_swa",
                                  "granitemoe_swa", "cwm", "vaultgemma", "helium", "lfm3", "ministral", "flex_olmo", "nanochat", "hy_v3",
                                  "cohere2_moe", "minicpm3", "minicpm", "bailing_moe_v2", "gpt2", "falcon",
                                  "falcon, two norms, groups, biases, own head, bfloat16", "bitnet", "kimi_linear",
                                  "kimi_linear, one group, other layers, bfloat16", "jamba", "jamba, no experts, tied, bfloat16", "mamba",
                                  "mamba2", "falcon_mamba", "bailing_hybrid", "bailing_hybrid, no bound, other layers, bfloat16", "flint",
                                  "kolibri1", "laguna", "laguna, gates of channels, other layers, bfloat16", "axk1", "bloom", "dbrx",
                                  "minimax", "mimo_v2_flash", "mpt", "muse_glimmer", "step3p7", "zamba2",
                                  "zamba2, one block, no positions, groups, bfloat16", "modernbert_decoder", "longcat_flash", "codegen",
                                  "gpt_bigcode", "gpt_neo", "gptj", "persimmon", "deepseek_ocr2_text", "ernie4_5_vl_moe", "rwkv7",
                                  "diffllama", "doge", "axk2, groups, other layers, tied, bfloat16", "ouro"])
def test_the_other_backend_agrees(name: str, tmp_path: Path) -> None:
    """Layers on torch, on CPU tensors: the same logits."""
    model = written(CASES[name], tmp_path)
    fix_rope(model, CONTEXT)
    prepared = prepare(tmp_path, EngineOptions(device="cpu", kv="32bit", ctx=CONTEXT))
    placement = replace(prepared.placement, devices=("cpu",) + ("cuda",) * (prepared.config.num_hidden_layers - 1))
    host = CpuOps(ThreadPool(1), dims(prepared.config, CONTEXT, prepared.shape.chunk, LOGIT_ROWS), default_registry(exact=True))
    engine, ids = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")}), text(model, 200)
    try:
        list(engine.model.load())
        list(engine.prefill(ids[:190]))
        assert_close(np.stack([engine.forward_logits([token])[0].copy() for token in ids[190:]]), oracle(model, ids)[190:])
    finally:
        engine.close()


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_gemma3_is_found_under_each_prefix_it_is_published_with(prefix: str, tmp_path: Path) -> None:
    saved(Case("gemma3_text", {"head_dim": 16, "tie_word_embeddings": False}), tmp_path)
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {head if name == "lm_head.weight" else prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as store:
        found = check_tensors(read_config(tmp_path), store)
        assert {tensor.name for roles in found.values() for tensor in roles.values()} == renamed.keys()
        del store.tensors[head]
        with pytest.raises(CheckpointError, match="lm_head.weight is missing"):
            check_tensors(read_config(tmp_path), store)


def test_the_cases_are_what_they_say(tmp_path: Path) -> None:
    """Shards are several files, windows and scalings change the result: a comparison of equal things would show nothing."""
    case = CASES["llama, shards, older dialect"]
    scaled = written(case, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and "rope_scaling" in json.loads((tmp_path / "config.json").read_text())
    ids = text(scaled, 200)
    plain = written(Case("llama"), tmp_path / "plain")
    assert np.abs(oracle(scaled, ids) - oracle(plain, ids)).max() > 0.1
    windowed, full = (written(CASES[f"mistral, {name}"], tmp_path / name) for name in ("window over pages", "no window"))
    difference = np.abs(oracle(windowed, ids) - oracle(full, ids)).max(axis=1)
    assert difference[:150].max() < 1e-4 and difference[150:].max() > 0.1
    tried = {MODEL_TYPE_ALIASES.get(case.family, case.family) for case in CASES.values()}
    assert tried == {*FAMILIES} - {*EMBEDDING_FAMILIES}, "CASES of family_models.py"
