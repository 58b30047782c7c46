"""Models opened with parts of their weights on disk, whatever the machine's memory."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import effllm
from effllm.offload.expert_cache import PolicyChoice
from effllm.offload.placement import Residency
from effllm.offload.shards import Planned, plan_files
from effllm.runtime.adapters.dora import resolve_lengths
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine
from effllm.runtime.measuring.synthetic import SyntheticStore
from effllm.runtime.prepare import EngineOptions, Prepared, prepare
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights.paged_experts import PagedExperts, expert_layout
from effllm.runtime.weights.stream_layout import plan_layout
from effllm.runtime.weights.streamed_weights import StreamingPlan

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def streams(folder: Path, options: EngineOptions, keep: int = 0, ring: int | None = None, direct: bool = True) -> StreamingPlan:
    """Every `keep`-th part pinned (0: none, 1: all), the rest in a ring buffer for two parts, or of `ring` bytes."""
    prepared = prepare(folder, options)
    parts = plan_layout(check_tensors(prepared.config, prepared.store, prepared.container), prepared.store)
    prepared.store.close()
    pinned = tuple(i for i in range(len(parts.parts)) if keep and i % keep == 0)
    streamed = tuple(i for i in range(len(parts.parts)) if i not in pinned)
    assert streamed or keep == 1, "what is too small to be cut stays in memory"
    room = max(2 * max(parts.sizes), ring or 0)
    residency = Residency(pinned, streamed, sum(parts.sizes[i] for i in pinned), sum(parts.sizes[i] for i in streamed), room)
    return StreamingPlan(parts, residency, direct=direct)


def streaming(folder: Path, keep: int = 0, ring: int | None = None, direct: bool = True, **options: object) -> Engine:
    """An engine that streams weights."""
    asked = EngineOptions(device="cpu", **options)
    made = streams(folder, asked, keep, ring, direct)
    engine = Engine(_measured(replace(prepare(folder, asked), streaming=made)))
    for _ in engine.model.load():
        continue
    return engine


def _measured(prepared: Prepared) -> Prepared:
    steps = resolve_lengths(prepared)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value


def paging(folder: Path, slots: int, policy: str = "lru", direct: bool = True, kv_pages: int | None = None, **options: object) -> Engine:
    """An engine that holds `slots` of its experts, and `kv_pages` pages of its cache, or all."""
    asked = EngineOptions(device="cpu", **options)
    prepared = prepare(folder, asked)
    prepared = replace(prepared, placement=replace(prepared.placement, kv_pages=kv_pages))
    own = prepared.config.moe
    parts = expert_layout(check_tensors(prepared.config, prepared.store, prepared.container), own.num_experts, own.experts_per_token,
                          prepared.store)
    assert slots <= len(parts.parts), f"{slots} slots for {len(parts.parts)} experts"
    engine = Engine(replace(prepared, streaming=PagedExperts(parts, slots, PolicyChoice(policy, 0.5), direct=direct)))
    for _ in engine.model.load():
        continue
    return engine


def larger_than_memory(folder: Path, layers: int = 8, **changes: object) -> Path:
    """A model of a quarter of a gigabyte with random weights and the packaged model's tokenizer, in bf16."""
    return random_model(folder, **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 16,
                                   "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False, **changes})


def long_context(folder: Path) -> Path:
    """A small model with a large cache: 8 KiB a token at 16 bits."""
    return random_model(folder, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=128,
                        max_position_embeddings=16_384)


def long_context_mixture(folder: Path) -> Path:
    """The same cache, beside 50 MB of experts."""
    fable = json.loads((FABLE / "config.json").read_text())
    shape = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 256,
             "intermediate_size": 512, "moe_intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 8, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
             "max_position_embeddings": 16_384, "vocab_size": fable["vocab_size"], "bos_token_id": fable.get("bos_token_id"),
             "eos_token_id": fable.get("eos_token_id"), "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return random_folder(folder, shape)


def random_model(folder: Path, **changes: object) -> Path:
    """The packaged model's config with changes, random weights, and its tokenizer."""
    return random_folder(folder, {**json.loads((FABLE / "config.json").read_text()), **changes})


def differing(rng: np.random.Generator) -> Callable[[str, np.ndarray], np.ndarray]:
    """What `random_folder` changes so that tokens differ, and so go to different experts."""
    def change(name: str, values: np.ndarray) -> np.ndarray:
        if "embed" not in name and not name.endswith("mlp.gate.weight"):
            return values
        return (rng.standard_normal(values.nbytes // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    return change


def random_folder(folder: Path, shape: Mapping[str, object],
                  change: Callable[[str, np.ndarray], np.ndarray] = lambda _, values: values) -> Path:
    """Random weights for a config, the packaged model's tokenizer; `change` makes other bytes of a tensor's."""
    folder.mkdir()
    for path in FABLE.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(shape))
    store = SyntheticStore(parse_config(shape))
    (plan,) = plan_files([[Planned(info.name, info.dtype, info.shape, info.nbytes)] for info in store.tensors.values()], {})
    with (folder / plan.name).open("wb") as out:
        out.write(plan.head)
        for name, place in plan.places.items():
            if name in store.tensors:
                out.seek(place)
                out.write(change(name, store.read(store.tensors[name])).data)
    return folder
