"""Every family against transformers, which defines what a checkpoint means: tiny random models, float32, exact KV cache.

Weights are drawn wide (and norms and biases redrawn) so that logits differ clearly between tokens and no bias is zero. Logits are held
to 1e-4 of the largest logit; greedy tokens are equal. Prompt lengths lie around page edges (64 sinks, then pages of 128), windows are
shorter than the prompts, and the longest prompts and the decode steps behind them meet sealed pages. transformers stretches two rotary
kinds anew as a text grows; effllm fixes them for its context, so the oracle is given the frequencies of that context.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.families import FAMILIES
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings

CONTEXT = 512
LENGTHS = (1, 5, 63, 64, 65, 191, 192, 193, 340)
DECODE_FROM = (5, 180, 310)  # steps cross the edges at 64 and 192, and the sealing of the first page at 320
STEPS = 40
TOLERANCE = 1e-4  # of the largest logit
RAMP = [1.0 + 0.1 * i for i in range(8)]


@dataclass(frozen=True)
class Case:
    """A family with changes to the small config; `shard` and `dtype` are how it is saved, `older` rewrites the config's dialect."""

    family: str
    changes: dict[str, object] = field(default_factory=dict)
    shard: str = "5GB"
    dtype: str = "float32"
    older: bool = False


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


SMALL_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
NO_EOS = {"eos_token_id": None, "num_key_value_heads": 4}
CASES = {
    "llama, odd vocabulary": Case("llama", {"vocab_size": 301}),
    "llama, biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "num_key_value_heads": 4, "hidden_act":
                                    "gelu"}),
    "llama, tied, one KV head": Case("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama, shards, older dialect": Case("llama", rope("linear", factor=4.0), shard="60KB", older=True),
    "llama, bfloat16": Case("llama", {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}, dtype="bfloat16"),
    "llama, float16": Case("llama", {"tie_word_embeddings": True}, dtype="float16"),
    "llama, linear": Case("llama", rope("linear", factor=2.0)),
    "llama, dynamic": Case("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": CONTEXT // 2}),
    "llama, llama3": Case("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                        original_max_position_embeddings=64)),
    "llama, yarn": Case("llama", rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "llama, longrope": Case("llama", rope("longrope", short_factor=RAMP, long_factor=[4 * x for x in RAMP],
                                          original_max_position_embeddings=64)),
    "mistral, window": Case("mistral", {"sliding_window": 40, "num_key_value_heads": 1}),
    "mistral, window over pages": Case("mistral", {"sliding_window": 150}),
    "mistral, no window": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True, "vocab_size": 301}),
    "qwen2, windows above": Case("qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, mixed layers": Case("qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 70,
                                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "mixtral": Case("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_act": "gelu"}),
    "mixtral, window, bfloat16": Case("mixtral", {"num_local_experts": 4, "sliding_window": 40, "tie_word_embeddings": True},
                                      dtype="bfloat16"),
    "qwen3_moe": Case("qwen3_moe", {**SMALL_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3_moe, some layers dense": Case("qwen3_moe", {**SMALL_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers":
                                                       [3], "attention_bias": True, "use_sliding_window": True, "sliding_window": 70}),
    "qwen3_moe, bfloat16": Case("qwen3_moe", {**SMALL_EXPERTS, "norm_topk_prob": True}, dtype="bfloat16"),
    "olmoe": Case("olmoe", {"num_experts": 9, "num_experts_per_tok": 4, "vocab_size": 301, **NO_EOS}),
    "olmoe, one expert, float16": Case("olmoe", {"num_experts": 3, "num_experts_per_tok": 1, "attention_bias": True, "norm_topk_prob": True,
                                                 **NO_EOS}, dtype="float16"),
}


def written(case: Case, folder: Path) -> PreTrainedModel:
    """Save a random model in `folder` and return it as transformers reads it, in float32."""
    config = AutoConfig.for_model(case.family, **{
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.2, **case.changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, which start at 1, and biases, which start at 0
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard)
    if case.older:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        section = raw.pop("rope_parameters")
        raw |= {"rope_theta": section.pop("rope_theta"), "torch_dtype": raw.pop("dtype"), "rope_scaling":
                {"type": section.pop("rope_type"), **section}}
        path.write_text(json.dumps(raw))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def fix_rope(model: PreTrainedModel, ctx: int) -> None:
    """Hold the frequencies at those of a context of `ctx`, whatever the length of a text."""
    rotary = model.model.rotary_emb
    if rotary.rope_type in ("dynamic", "longrope"):
        rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config, torch.device("cpu"), seq_len=ctx)
        rotary.rope_type = "default"


def opened(folder: Path, **options: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=CONTEXT, strict=True, chunk=128, **options))
    assert isinstance(engine, Engine) and engine.n_ctx == CONTEXT
    return engine


@pytest.fixture(params=CASES, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, PreTrainedModel]]:
    """(ours, transformers') for one case."""
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    model = written(case, folder)
    fix_rope(model, CONTEXT)
    # 512 positions are more than the dynamic model was trained for, which is what it is there to show.
    engine = opened(folder, force=model.config.max_position_embeddings < CONTEXT)
    yield engine, model
    engine.close()


def oracle(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def text(model: PreTrainedModel, length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, model.config.vocab_size, length).tolist()


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.shape == expected.shape
    scale = np.abs(expected).max()
    worst = np.abs(ours - expected).max()
    assert worst <= TOLERANCE * scale, f"differs by {worst:.2e}, {worst / scale:.2e} of the largest logit"


def test_logits_of_prompts(pair: tuple[Engine, PreTrainedModel]) -> None:
    engine, model = pair
    for length in LENGTHS:
        ids = text(model, length)
        scored = [(start, logits.copy()) for start, logits in engine.score(ids)]
        assert [start for start, _ in scored] == np.cumsum([0] + [len(logits) for _, logits in scored[:-1]]).tolist()
        assert_close(np.concatenate([logits for _, logits in scored]), oracle(model, ids))


def test_greedy_tokens(pair: tuple[Engine, PreTrainedModel]) -> None:
    engine, model = pair
    for length in DECODE_FROM:
        ids = text(model, length)
        list(engine.prefill(ids))
        sampler = Sampler(SamplerSettings(temperature=0), model.config.vocab_size)
        steps = list(engine.generate(sampler, STEPS, frozenset()))
        tokens = [step.token for step in steps]
        assert len(tokens) == STEPS and steps[-1].finish == "length"
        # Each token is the best one after those before it: by induction the greedy text is the same.
        assert oracle(model, ids + tokens)[length - 1 : -1].argmax(-1).tolist() == tokens


def test_logits_of_single_steps(pair: tuple[Engine, PreTrainedModel]) -> None:
    engine, model = pair
    for length in DECODE_FROM:
        ids = text(model, length + STEPS)
        list(engine.prefill(ids[:length]))
        steps = [engine.forward_logits([token])[0].copy() for token in ids[length:]]
        assert_close(np.stack(steps), oracle(model, ids)[length:])


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
    assert {case.family for case in CASES.values()} == set(FAMILIES)
