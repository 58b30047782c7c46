"""Every family against transformers, which defines what a checkpoint means: tiny random models, float32, exact KV cache.

Weights are drawn wide (and norms and biases redrawn) so that logits differ clearly between tokens and no bias is zero. Logits are held
to 1e-4 of the largest logit; greedy tokens are equal. Prompt lengths lie around page edges (64 sinks, then pages of 128), windows are
shorter than the prompts, and the longest prompts and the decode steps behind them meet sealed pages. transformers stretches two rotary
kinds anew as a text grows; effllm fixes them for its context, so the oracle is given the frequencies of that context.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine, open_prepared
from effllm.runtime.families import FAMILIES, MAKING_VECTORS, RENAMED
from effllm.runtime.last_layers import KEPT, attending_alone, first_alone
from effllm.runtime.planning.demands import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare, prepare_with
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.source import open_store
from effllm.runtime.tensors import check_tensors
from effllm.runtime.widths import dims

sys.path.insert(0, str(Path(__file__).parent))
from family_models import CASES, CONTEXT, TOLERANCE, Case, assert_close, oracle, rotary_of, share_angles, text, written
from saved_models import saved

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
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=CONTEXT, strict=True, chunk=128, **options))
    assert isinstance(engine, Engine) and engine.n_ctx == CONTEXT
    return engine


# Of each family the first case, and of those that most people run all.
OFTEN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi3", "deepseek_v3")
FIRST = {*{case.family: name for name, case in reversed(CASES.items())}.values()}
FIRST |= {name for name, case in CASES.items() if case.family in OFTEN}


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


def test_a_prompt_ends_as_if_all_of_it_went_through_every_layer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers run for its last tokens alone; not a bit of what comes next depends on that."""
    engine, length, run, widths, ends, told = pair.engine, DECODE_FROM[-1], pair.engine.model.forward, ([], []), [], {"wanted": None}

    def forward(*args: object, **rest: object) -> np.ndarray:
        widths[len(ends)].append(len(x := run(*args, **rest | told)))
        return x

    monkeypatch.setattr(engine.model, "forward", forward)
    for _ in widths:
        engine.reset()
        list(engine.prefill(pair.ids[:length]))
        ends.append([engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in pair.ids[length : length + 3])])
        told.clear()
    most = KEPT if attending_alone(engine.config) or first_alone(engine.config) < engine.config.num_hidden_layers else length
    assert np.array_equal(*ends) and sum(widths[0]) == length + 3 and widths[1] == [min(most, each) for each in widths[0]]


def test_logits_of_single_steps(pair: Pair) -> None:
    engine, model, longest, expected = pair
    for length in DECODE_FROM:
        ids = longest[: length + STEPS]
        list(engine.prefill(ids[:length]))
        steps = [engine.forward_logits([token])[0].copy() for token in ids[length:]]
        assert_close(np.stack(steps), expected[length : length + STEPS], lambda ids=ids: oracle(model, ids, torch.float32)[-STEPS:])


# Case -> what of its config can be taken away while the tensors stay as they are.
PECULIAR = {
    "minimax": [{"factors": {role: 1.0}} for role in ("o", "state_out", "kept.full", "kept.linear", "kept.mlp")] + [
        {"mixture": {"factor": 1.0}}, {"mixture": {"renormalise": False}}, {"norm_eps": 1e-5}, {"state_norm_eps": 1.0}],
    "dbrx": [{"clip_qkv": None}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}] + [
        {"mixture": each} for each in ({"renormalise": False}, {"per_token": 1})],
    "molmo2, norms behind, stretched in a layer, bfloat16": [{"ropes": 0}, {"ropes": 1}],
    "phi3": [{"windows": (None,) * 3}],
    "phi4_multimodal": [{"ropes": {"partial_rotary_factor": 1.0}}, {"norm_eps": 1e-1}],
    "cohere_compass_text": [{"windows": (None,) * 4}, {"ropes": 0}, {"ropes": 3}, {"norm_kind": "rms"}, {"logits_scaling": 1.0}],
    "arcee": [{"hidden_act": "relu"}],
    "bitnet": [{"hidden_act": "relu"}, {"norm_eps": 1e-1}],
    "ernie4_5": [{"ropes": {"neighbours": False}}],
    "exaone4": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}],
    "gemma": [{"embedding_multiplier": 1.0}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "gemma, bfloat16": [{"embedding_multiplier": 90**0.5}],
    "gemma2": [{"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"attn_scale": None}, {"embedding_multiplier": 1.0},
               {"windows": (None,) * 3}, {"windows": (40,) * 3}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "gemma2, bfloat16": [{"embedding_multiplier": 90**0.5}],
    "gemma3_text": [{"attn_scale": None}, {"final_logit_softcapping": None}, {"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}],
    "gemma3": [{"embedding_multiplier": 1.0}, {"ropes": 1}],
    "glm": [{"ropes": {"neighbours": False}}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "glm4": [{"ropes": {"neighbours": False}}],
    "mistral, images": [{"windows": (None,) * 3}],
    "bamba": [{"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "hyperclovax": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "granite_swa": [{"windows": (None,) * 4}, {"windows": (40,) * 4}, {"ropes": 0}, {"ropes": 1}, {"ropes": 3}, {"attn_scale": None},
                    {"residual_multiplier": 1.0}],
    "granitemoe_swa": [{"windows": (None,) * 4}, {"mixture": {"shared_width": None}}, {"mixture": {"factor": 1.0}}],
    "lfm3": [{"windows": (None,) * 5}, {"qk_norm": False}, {"norm_eps": 1e-1}],
    "ministral": [{"windows": (None,) * 3}, {"windows": (40,) * 3}],
    "flex_olmo": [{"mixture": {"per_token": 2}}, {"norm_eps": 1e-1}],  # a norm undoes sums
    "gpt_bigcode": [{"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "silu"}, {"attn_scale": 1.0}],
    "gpt_neo": [{"windows": (None,) * 3}, {"windows": (None, 41, 41)}, {"attn_scale": None}, {"hidden_act": "silu"}],
    "gptj": [{"ropes": {"neighbours": False}}, {"ropes": {"partial_rotary_factor": 1.0}}, {"norm_eps": 1e-1}, {"hidden_act": "silu"}],
    "persimmon": [{"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"hidden_act": "relu"}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "longcat_flash": [{"mixture": each} for each in ({"renormalise": True}, {"sigmoid": True}, {"factor": 1.0}, {"corrected": False})] + [
        {"factors": {"q_a_norm": 1.0}}, {"factors": {"kv_a_norm": 1.0}}, {"norm_eps": 1e-1}, {"ropes": (None,) * 4}, {"attn_scale": 1.0}],
    "modernbert_decoder": [{"windows": (None,) * 3}, {"windows": (None, 80, 80)}, {"ropes": 0}, {"norm_eps": 1e-1}, {"norm_kind": "rms"},
                           {"head_act": "gelu"}],
    "nanochat": [{"ropes": {"backwards": False}}, {"final_logit_softcapping": None}, {"qk_norm_unit": False}, {"norm_eps": 1e-1},
                 {"hidden_act": "relu"}],
    "hy_v3": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"factor": 1.0}, {"corrected": False},
                                             {"shared_width": None})] + [{"qk_norm": False}],
    "cohere2_moe": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"factor": 1.0}, {"shared_width": None})] + [
        {"factors": {"shared.down": 1.0}}, {"windows": (None,) * 5}, {"ropes": 4}, {"ropes": 0}, {"norm_kind": "layer"},
        {"logits_scaling": 1.0}],
    "minicpm3": [{"residual_multiplier": 1.0}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0}, {"ropes": {"neighbours": True}}],
    "minicpm": [{"residual_multiplier": 1.0}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "mimo": [{"qkv_bias": False}],
    "bailing_moe_v2": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"groups": 1, "kept_groups": 1},
                                                      {"corrected": False}, {"factor": 1.0}, {"shared_width": None})] + [
        {"ropes": {"partial_rotary_factor": 1.0}}],
    "gpt2": [{"hidden_act": "silu"}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"attn_scale": 1.0}],
    "falcon": [{"hidden_act": "silu"}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"ropes": (None,) * 3}],
    "cwm": [{"windows": (None,) * 3}, {"windows": (40,) * 3}, {"ropes": {"factor": 1.0}}],
    "vaultgemma": [{"windows": (None,) * 3}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"attn_scale": None}],
    "helium": [{"ropes": {"neighbours": False}}, {"norm_eps": 1e-1}],
    "jais2": [{"hidden_act": "relu"}, {"norm_eps": 1e-1}, {"ropes": (None,) * 3}],
    "bailing_hybrid": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"groups": 1, "kept_groups": 1},
                                                      {"corrected": False}, {"factor": 1.0})] + [
        {"norm_eps": 1e-1}, {"attn_scale": 0.3}, {"state": {"bound": None}}, {"state": {"bound": -5.0}}],
    "flint": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"shared_width": None})] + [
        {"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 2}, {"norm_eps": 1e-1}],
    "kolibri1": [{"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 4}, {"norm_eps": 1e-1}] + [
        {"mixture": each} for each in ({"of_logits": False}, {"corrected": False}, {"renormalise": True}, {"per_token": 2})],
    "muse_glimmer": [{"windows": (None,) * 4}, {"ropes": 0}, {"ropes": 3}, {"attn_scale": None}, {"qk_norm_unit": False},
                     {"qk_norm_still": False}, {"embedding_normed": False}, {"last_norm": None}, {"behind_eps": None}, {"norm_eps": 1e-5},
                     {"norm_kind": "rms"}, {"logits_scaling": 1.0}, {"final_logit_softcapping": None}],
    "step3p7": [{"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 1}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"gate_bounds": ()},
                {"gate_bounds": ((None, 0.5), (None, 0.5), (0.4, 0.3), (0.7, None), (0.4, None))},
                {"gate_bounds": ((None, None), (None, None), (0.4, 0.4), (0.7, None), (None, None))}] + [
        {"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"factor": 1.0}, {"shared_width": None})],
    "axk2": [{"mixture": each} for each in ({"renormalise": False}, {"corrected": False}, {"factor": 1.0}, {"shared_width": None})] + [
        {"norm_eps": 1e-1}, {"ropes": {"neighbours": False}}, {"attn_scale": 1 / 4}],
    "axk1": [{"mixture": each} for each in ({"sigmoid": False}, {"groups": 1, "kept_groups": 1}, {"corrected": False})] + [
        {"norm_eps": 1e-5}, {"ropes": {"neighbours": False}}, {"attn_scale": 1 / 4}],
    "bloom": [{"slopes": (0.25,) * 4}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "mimo_v2_flash": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}, {"factors": {"v": 1.0}}, {"norm_eps": 1e-1}] + [
        {"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"corrected": False})],
    "mpt": [{"slopes": (0.25,) * 4}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "zamba2": [{"norm_eps": 1e-1}, {"state_norm_eps": 1.0}, {"attn_scale": None}, {"hidden_act": "silu"}, {"ropes": (None,) * 6}],
    "laguna": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}, {"gates_softplus": False}, {"mixture": {"renormalise": False}},
               {"mixture": {"corrected": False}}, {"mixture": {"factor": 1.0}}, {"mixture": {"shared_width": None}}],
    "afmoe": [{"windows": (None,) * 4}, {"ropes": 0}, {"ropes": 3}, {"embedding_multiplier": 1.0}, {"norm_eps": 1e-1}] + [
        {"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"per_token": 2})],
    "gpt_neox": [{"side_by_side": False}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"hidden_act": "silu"},
                 {"ropes": {"partial_rotary_factor": 1.0}}],
    "phi": [{"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"hidden_act": "silu"}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "mellum": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}, {"mixture": {"renormalise": False}}],
    "mistral4": [{"ropes": {"llama_4_scaling_beta": 0.1}}, {"ropes": {"neighbours": False}}, {"mixture": {"sigmoid": True}},
                 {"mixture": {"renormalise": False}}],
    "ministral3": [{"ropes": {"llama_4_scaling_beta": 0.1}}, {"ropes": {"mscale": None}}],
    "olmo": [{"clip_qkv": None}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}],
    "phimoe": [{"mixture": {"near": None}}, {"mixture": {"near": 0.02}}, {"norm_kind": "rms"}, {"windows": (None,) * 3}],
    "olmo_hybrid": [{"norm_eps": 1e-1}, {"state_norm_eps": 1e-1}, {"norm_kind": "rms+1"}],
    "kimi_linear": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"groups": 1, "kept_groups": 1},
                                                   {"corrected": False}, {"factor": 1.0})] + [{"norm_eps": 1e-1}, {"attn_scale": 0.3}],
    "jamba": [{"mixture": {"renormalise": True}}, {"mixture": {"per_token": 1}}, {"norm_eps": 1e-1}, {"state_norm_eps": 1.0}],
    "mamba": [{"norm_eps": 1e-1}, {"state": {"normed": True}}],
    "mamba2": [{"norm_eps": 1e-1}, {"state": {"normed": False}}],
    "falcon_mamba": [{"norm_eps": 1e-1}, {"state_norm_eps": 1.0}, {"state": {"normed": False}}],
    "rwkv7": [{"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "relu"}, {"state": {"eps": 1.0}}],
    "olmo3": [{"windows": (None,) * 3}, {"windows": (40,) * 3}, {"ropes": 0}, {"ropes": 1}],
    "qwen3_5_moe_text": [{"mixture": each} for each in ({"renormalise": False}, {"shared_scaled": False}, {"shared_width": None})],
    "qwen3_next": [{"mixture": each} for each in ({"renormalise": False}, {"shared_scaled": False})] + [{"norm_kind": "rms"}],
    "llama4_text": [{"mixture": each} for each in ({"of_inputs": False}, {"sigmoid": False}, {"shared_width": None}, {"per_token": 2})] + [
        {"ropes": 0}, {"ropes": 1}, {"qk_norm_unit": False}],
    "lfm2": [{"qk_norm": False}, {"ropes": (None,) * 3}, {"norm_eps": 1e-1}],
    "lfm2_moe": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"factor": 1.0}, {"corrected": False})],
    "qwen3_5_text": [{"norm_kind": "rms"}, {"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "smollm3": [{"ropes": 0}, {"ropes": 1}],
    "smollm3, windows": [{"windows": (None,) * 3}, {"ropes": 0}],
    "starcoder2": [{"windows": (None,) * 3}, {"norm_eps": 1e-1}, {"hidden_act": "silu"}],
    "granite": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "mixtral": [{"mixture": {"renormalise": False}}, {"mixture": {"per_token": 1}}, {"hidden_act": "silu"}],
    "qwen3_moe": [{"mixture": {"renormalise": False}}, {"mixture": {"per_token": 4}}],
    "olmoe": [{"mixture": {"renormalise": True}}, {"mixture": {"per_token": 3}}],
    "granitemoe": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0},
                   {"mixture": {"factor": 1.0}}, {"mixture": {"renormalise": False}}],
    "granitemoehybrid, state spaces": [{"residual_multiplier": 1.0}, {"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "granitemoehybrid, experts, bfloat16": [{"mixture": {"factor": 1.0}}, {"residual_multiplier": 1.0}],
    "granitemoehybrid": [{"attn_scale": None}, {"residual_multiplier": 1.0}, {"ropes": (None,) * 3}],
    "ernie4_5_vl_moe": [{"mixture": each} for each in ({"renormalise": False}, {"corrected": False}, {"shared_width": None})] + [
        {"ropes": {"neighbours": False}}],
    "ernie4_5_moe": [{"mixture": each} for each in ({"renormalise": False}, {"corrected": False}, {"shared_width": None})],
    "qwen2_moe": [{"mixture": {"renormalise": True}}, {"mixture": {"shared_scaled": False}}, {"mixture": {"shared_width": None}}],
    "glm4_moe": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"factor": 1.0}, {"corrected": False},
                                                {"shared_width": None})] + [{"qk_norm": False}],
    "deepseek_v2": [{"mixture": each} for each in ({"factor": 1.0}, {"groups": 1, "kept_groups": 1}, {"shared_width": None},
                                                   {"renormalise": True})] + [{"attn_scale": 1 / 6}, {"ropes": {"neighbours": False}}],
    "deepseek_v3": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"groups": 1, "kept_groups": 1},
                                                   {"corrected": False})] + [{"attn_scale": 1 / 6}, {"ropes": {"neighbours": False}}],
    "glm4_moe_lite": [{"norm_eps": 1e-5}, {"ropes": {"neighbours": False}}, {"mixture": {"factor": 1.0}}],
    "deepseek_v32": [{"mixture": each} for each in ({"renormalise": False}, {"groups": 1, "kept_groups": 1}, {"corrected": False})] + [
        {"ropes": {"neighbours": False}}],
    "deepseek_v4": [{"mixture": each} for each in ({"renormalise": False}, {"roots": False}, {"factor": 1.0}, {"corrected": False})] + [
        {"hidden_act": "silu"}, {"windows": (39,) * 4}, {"ropes": 0}, {"ropes": 1}, {"norm_eps": 1e-1}],
    "qwen4_exp_text": [{"mixture": {"renormalise": False}}, {"state": {"sigmoid": True}}, {"ngrams": {"end": 8}},
                       {"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "doge": [{"norm_eps": 1e-1}, {"qk_norm": False}, {"attn_scale": 0.1}, {"ropes": (None,) * 3}],
    "diffllama": [{"norm_eps": 1e-1}, {"attn_scale": 0.1}, {"ropes": (None,) * 3}],
    "zaya": [{"mixture": {"renormalise": True}}, {"norm_eps": 1e-1}, {"ropes": (None,) * 3}],
    "glm5_next": [{"mixture": {"renormalise": False}}, {"mixture": {"corrected": False}}, {"norm_eps": 1e-1},
                  {"mix_rounds": 1}, {"state": {"bound": None}}],
    "mistral_large4": [{"ropes": {"neighbours": False}}, {"norm_eps": 1e-1}, {"final_logit_softcapping": 3.0},
                       {"frequencies_learned": False}, {"mixture": {"renormalise": False}}],
    "dots1": [{"mixture": {"renormalise": False}}, {"mixture": {"corrected": False}}, {"windows": (None,) * 3}],
    "gemma3n_text": [{"windows": (None,) * 6}, {"ropes": 0}, {"values_normed": False}, {"attn_scale": None}, {"input_multiplier": 1.0},
                     {"cuts": ()}, {"cuts": (0.0,) * 6}, {"kv_sources": (0, 1, 2, 3, 0, 1)}],
    "gemma4_text": [{"windows": (None,) * 6}, {"ropes": 0}, {"ropes": 1}, {"values_normed": False}, {"input_multiplier": 1.0},
                    {"final_logit_softcapping": None}, {"attn_scale": None}, {"kv_sources": (0, 1, 2, 3, 0, 1)}],
    "gemma4_text, mixture": [{"mixture": {"per_token": 1}}, {"values_normed": False}, {"attn_scale": None}],  # a norm undoes sums
    "gpt_oss": [{"windows": (None,) * 3}, {"windows": (40,) * 3}, {"hidden_act": "silu"}, {"mixture": {"renormalise": False}},
                {"mixture": {"per_token": 1}}],
    "nemotron_h, experts": [{"mixture": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"factor": 1.0},
                                                           {"corrected": False}, {"shared_width": None})] + [{"hidden_act": "relu"}],
    "falcon_h1": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0}, {"ropes": (None,) * 3},
                  *({"factors": {role: 1.0}} for role in ("o", "state_out", "post_norm", "down", "state_gate", "state_in.values",
                                                          "state_in.b", "state_in.c", "state_rate"))],
    "cohere, norms of every head": [{"norm_eps": 1e-1}, {"norm_kind": "rms"}],
    "hunyuan_v1_moe": [{"mixture": each} for each in ({"renormalise": False}, {"shared_width": None}, {"per_token": 2})],
    "nemotron": [{"norm_kind": "layer"}, {"hidden_act": "relu"}, {"norm_eps": 1e-1}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "stablelm": [{"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "stablelm, side by side": [{"norm_eps": 1e-1}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "deepseek_ocr2_text": [{"mixture": each} for each in ({"renormalise": True}, {"sigmoid": True}, {"factor": 1.0},
                                                          {"shared_width": None}, {"per_token": 2})] + [{"norm_eps": 1e-1}],
    "opt": [{"position_offset": 0}, {"position_offset": 1}, {"hidden_act": "gelu"}, {"norm_eps": 1e-1}],
}


@pytest.mark.slow  # it asks whether the tests above could fail
@pytest.mark.parametrize("name", PECULIAR)
def test_every_peculiarity_of_a_family_shows(name: str, tmp_path: Path) -> None:
    """A comparison that could not fail would show nothing: without any one of them the logits are clearly others."""
    model = written(CASES[name], tmp_path)
    config, ids = read_config(tmp_path), text(model, 200)
    expected = oracle(model, ids)
    for taken in PECULIAR[name]:
        if isinstance(taken.get("ropes"), int):  # this layer's positions for all
            taken = {"ropes": (config.ropes[taken["ropes"]],) * config.num_hidden_layers}
        if isinstance(taken.get("ropes"), dict):  # other numbers in all layers' positions, or another order
            own = {field: value for field, value in taken["ropes"].items() if hasattr(config.rope, field)}
            other = replace(config.rope, **(own or {"params": {**config.rope.params, **taken["ropes"]}}))
            taken = {"ropes": (other,) * 3}
        if "factors" in taken:
            taken = {"factors": tuple((dict(config.factors) | taken["factors"]).items())}
        for part in ("state", "mixture", "ngrams"):
            if part in taken:
                taken = {part: replace(getattr(config, part), **taken[part])}
        asked = EngineOptions(kv="32bit", device="cpu", ctx=256)
        *_, engine = open_prepared(partial(prepare_with, tmp_path, replace(config, **taken), open_store(tmp_path), asked), ("raw",))
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
        engine.close()
        assert np.abs(ours - expected).max() > 10 * TOLERANCE * np.abs(expected).max(), taken


@pytest.mark.parametrize("name", ["phi3, longrope over half a head", "gemma", "gemma2", "gemma3", "olmo2", "olmo3", "ministral3",
                                  "seed_oss", "smollm3", "granite", "opt", "mixtral", "qwen3_moe, bfloat16", "olmoe", "gpt_oss",
                                  "granitemoe", "granitemoehybrid", "qwen2_moe", "glm4_moe", "dots1, no windows, bfloat16", "starcoder2",
                                  "exaone4", "arcee", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "deepseek_v2", "deepseek_v3",
                                  "glm4_moe_lite", "mistral4", "mistral_large4, all seen, bfloat16", "youtu",
                                  "qwen3_5_text", "qwen3_5_text, other layers", "qwen3_5_moe_text",
                                  "qwen3_next", "llama4_text", "lfm2", "lfm2, other taps, bfloat16", "lfm2_moe",
                                  "granitemoehybrid, state spaces", "nemotron_h", "nemotron_h, experts", "bamba", "falcon_h1",
                                  "falcon_h1, norms, tied, bfloat16", "cohere, norms of every head", "hunyuan_v1_moe", "nemotron",
                                  "stablelm", "apertus", "granitemoehybrid, experts, bfloat16", "gemma4_text",
                                  "gemma4_text, keys as values", "gemma4_text, mixture", "gemma3n_text",
                                  "gemma3n_text, two streams, windows over pages, bfloat16", "afmoe", "gpt_neox", "phi",
                                  "stablelm, side by side", "olmo", "phimoe", "olmo_hybrid", "granite_swa", "granitemoe_swa", "cwm",
                                  "vaultgemma", "helium", "lfm3", "ministral", "flex_olmo", "nanochat", "hy_v3", "cohere2_moe", "minicpm3",
                                  "minicpm", "bailing_moe_v2", "gpt2", "falcon", "falcon, two norms, groups, biases, own head, bfloat16",
                                  "bitnet", "kimi_linear", "kimi_linear, one group, other layers, bfloat16",
                                  "jamba", "jamba, no experts, tied, bfloat16", "mamba", "mamba2", "falcon_mamba",
                                  "bailing_hybrid", "bailing_hybrid, no bound, other layers, bfloat16",
                                  "flint", "kolibri1", "laguna", "laguna, gates of channels, other layers, bfloat16",
                                  "axk1", "bloom", "dbrx", "minimax", "mimo_v2_flash", "mpt", "muse_glimmer", "step3p7", "zamba2",
                                  "zamba2, one block, no positions, groups, bfloat16", "modernbert_decoder", "longcat_flash",
                                  "codegen", "gpt_bigcode", "gpt_neo", "gptj", "persimmon",
                                  "deepseek_ocr2_text", "ernie4_5_vl_moe", "rwkv7", "diffllama", "doge",
                                  "axk2, groups, other layers, tied, bfloat16"])
def test_the_other_backend_agrees(name: str, tmp_path: Path) -> None:
    """Layers on torch, on CPU tensors: the same logits."""
    model = written(CASES[name], tmp_path)
    fix_rope(model, CONTEXT)
    prepared = prepare(tmp_path, EngineOptions(device="cpu", kv="32bit", ctx=CONTEXT))
    placement = replace(prepared.placement, devices=("cpu",) + ("cuda",) * (prepared.config.num_hidden_layers - 1))
    host = CpuOps(ThreadPool(1), dims(prepared.config, CONTEXT, prepared.shape.chunk, LOGIT_ROWS))
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
    assert {RENAMED.get(case.family, case.family) for case in CASES.values()} == {*FAMILIES} - {*MAKING_VECTORS}
