"""Families with interleaved RoPE next to ones that rotate halves, with the same weights reordered: the same bits.

Whatever comes behind the rotation (pages, packed pages, the equalisers of a KV profile) then meets what it meets in any family.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import Case, rope
from safetensors.torch import load_file, save_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable

from effllm.runtime.calibrate import built_in_text
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.kv.kv_recording import record
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer

SIZES = {"vocab_size": 4096, "head_dim": 32, "initializer_range": 0.1, "tie_word_embeddings": False, "eos_token_id": None}
CASES = {"ernie4_5": Case("ernie4_5", {**SIZES, **rope("linear", factor=2.0), "use_bias": True}, dtype="float16"),
         "glm": Case("glm", {**SIZES, "attention_bias": False, **rope("default", partial_rotary_factor=0.5)}, dtype="float16")}
IDS = np.random.default_rng(5).integers(0, 4096, 420).tolist()


def in_halves(folder: Path, out: Path) -> Path:
    """The same model with its rows in the order of halves, as a Llama or, where gate and up are one, a Phi 3."""
    raw, held = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    depth, ours = raw["head_dim"], {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
    turned = int(depth * raw["rope_parameters"].get("partial_rotary_factor", 1.0))
    order = torch.cat([torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, depth)])
    for name, values in held.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = values.reshape(-1, depth, *values.shape[1:])
            held[name] = heads[:, order].reshape(values.shape)
    if raw["model_type"] == "glm":
        ours = {"model_type": "phi3", "attention_bias": False, "pad_token_id": 0}
        for layer in range(raw["num_hidden_layers"]):
            parts = [held.pop(f"model.layers.{layer}.self_attn.{each}_proj.weight") for each in "qkv"]
            held[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    out.mkdir()
    save_file({name: values.contiguous() for name, values in held.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**raw, **ours, "architectures": None}))
    return out


@pytest.fixture(params=CASES, scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp(request.param)
    saved(CASES[request.param], base / "model")
    return base / "model", in_halves(base / "model", base / "halves")


def opened(folder: Path, **options: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(device="cpu", ctx=512, threads=2, **options))
    return engine


def answers(folder: Path, **options: object) -> np.ndarray:
    """Logits of a prompt, and of tokens behind it one by one."""
    engine = opened(folder, **options)
    try:
        prompt = np.concatenate([rows.copy() for _, rows in engine.score(IDS[:400])])
        assert engine.cache.is_packed == (options["kv"] not in ("16bit", "32bit"))
        return np.concatenate([prompt, *(engine.forward_logits([token]).copy() for token in IDS[400:])])
    finally:
        engine.close()


@pytest.mark.parametrize("kv", ["32bit", "16bit", "4bit", "2bit"])
def test_the_bits_are_those_of_halves(folders: tuple[Path, Path], kv: str) -> None:
    ours, halves = (answers(folder, kv=kv) for folder in folders)
    assert np.array_equal(ours, halves) and np.isfinite(ours).all()


def test_a_kv_profile_is_that_of_halves(folders: tuple[Path, Path]) -> None:
    profiles = []
    for folder in folders:
        with_words_of_fable(folder)
        engine = opened(folder, kv="32bit", chunk=512)
        *_, profile = record(engine, Tokenizer.load(folder, engine.config), built_in_text()[:4000], "some weights", seconds=1e6)
        engine.close()
        profiles.append(profile)
    ours, halves = profiles
    assert ours.hash == halves.hash and any(cost is not None for cost in ours.costs)
    for one, other in zip(ours.costs, halves.costs, strict=True):
        assert one is other is None or all(np.array_equal(*sides) for sides in zip(one, other, strict=True))
