"""Folders that mlx-lm makes of small random models, against what mlx-lm computes from them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from gguf_samples import FABLE

from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.stores.import_config import MLX_FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.peer, pytest.mark.skipif(find_spec("mlx_lm") is None, reason="needs mlx-lm")]
SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "linear_conv_kernel_dim": 4}
# Of each family what it needs beside SIZES, and what mlx-lm looks for in a config by an older name.
CASES = {
    **{family: ({}, {}) for family in ("cohere", "gemma", "glm4", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
                                       "seed_oss", "smollm3", "starcoder2")},
    "cohere2": ({"num_hidden_layers": 5}, {"sliding_window_pattern": 4}),
    "gemma2": ({"query_pre_attn_scalar": 32}, {}),
    "gemma3_text": ({"query_pre_attn_scalar": 32, "num_hidden_layers": 7},
                    {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "rope_theta": 1e6}),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
             {"block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
              "block_auto_adjust_ff_dim": False, "conv_dim": 128, "conv_dim_out": 128}),
    "ministral3": ({}, {}),
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, {}),
    "olmoe": ({"num_experts": 8, "num_experts_per_tok": 2}, {}),
    "qwen2_moe": (SHARED, {"num_experts": 8}),
    "qwen3_moe": ({**MIXTURE, "decoder_sparse_step": 1}, {"num_experts": 8}),
    "qwen3_5_text": (DELTA, {}),
    "qwen3_5_moe_text": ({**DELTA, **SHARED}, {"num_experts": 8}),
}
ROUNDED = {"gemma": 1e-3, "gemma3_text": 1e-3, "granite": 3e-3, "qwen3_5_moe_text": 1e-3, "starcoder2": 1e-3}  # by curves of MLX, or halves
IDS = [int(each) for each in np.random.default_rng(0).integers(3, 319, 24)]
# What mlx-lm makes of a folder, and the logits that it computes: with 16-bit scales, in float32.
THEIRS = """
import json, sys
from pathlib import Path
import mlx.core as mx, numpy as np
from mlx_lm import convert
from mlx_lm.utils import load_model
source, made, mode, bits, group, ids = sys.argv[1:]
convert(hf_path=source, mlx_path=made, quantize=True, dtype="bfloat16", q_mode=mode, q_bits=int(bits), q_group_size=int(group))
model, _ = load_model(Path(made))
model.set_dtype(mx.float32)
np.save(made + ".npy", np.array(model(mx.array([json.loads(ids)])).astype(mx.float32))[0])
"""


def random_folder(folder: Path, family: str) -> None:
    more, older = CASES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more)).float()
    with torch.no_grad():
        for values in model.parameters():
            values.normal_(0, 0.06) if values.ndim > 1 else values.add_(torch.randn_like(values) * 0.1)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.get("rope_parameters") or {}
    rope = rope if "rope_theta" in rope or not rope else next(iter(rope.values()))
    raw = {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": None, **raw}
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope["partial_rotary_factor"]
    raw |= older
    if family.startswith("qwen3_5"):
        raw = {"model_type": family.removesuffix("_text"), "text_config": raw, "tie_word_embeddings": False,
               "architectures": [f"Qwen3_5{'Moe' * ('moe' in family)}ForConditionalGeneration"]}
        save_file(as_published(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((FABLE / file).read_bytes())


def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text part of a model that sees, with the experts of a layer as one."""
    for layer in range(SIZES["num_hidden_layers"]):
        own = f"model.layers.{layer}.mlp.experts."
        if f"{own}0.up_proj.weight" in tensors:
            gates, ups, downs = ([tensors.pop(f"{own}{i}.{role}_proj.weight") for i in range(8)] for role in ("gate", "up", "down"))
            tensors[f"{own}gate_up_proj"] = torch.stack([torch.cat(each) for each in zip(gates, ups, strict=True)])
            tensors[f"{own}down_proj"] = torch.stack(downs)
    return {name.replace("model.", "model.language_model.", 1): values.contiguous() for name, values in tensors.items()}


def compared(tmp_path: Path, family: str, mode: str, bits: int, group: int) -> float:
    """How far apart the logits are, by their largest."""
    random_folder(tmp_path / "source", family)
    found = subprocess.run([sys.executable, "-c", THEIRS, str(tmp_path / "source"), str(tmp_path / "mlx"), mode, str(bits), str(group),
                            json.dumps(IDS)], capture_output=True, text=True, env=os.environ, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    theirs = np.load(tmp_path / "mlx.npy")
    *_, engine = open_engine(tmp_path / "mlx", EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    ours = np.array(engine.forward_logits(IDS))
    engine.close()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("family", CASES)
def test_every_family_gives_what_mlx_gives(tmp_path: Path, family: str) -> None:
    assert compared(tmp_path, family, "affine", 4, 32) < ROUNDED.get(family, 1e-4)


@pytest.mark.parametrize(("mode", "bits", "group", "most"), [
    ("affine", 5, 64, 1e-5), ("affine", 2, 128, 1e-5), ("affine", 3, 64, 1e-5), ("affine", 6, 64, 2e-3), ("affine", 8, 64, 2e-3),
    ("mxfp4", 4, 32, 1e-5), ("mxfp8", 8, 32, 1e-5), ("nvfp4", 4, 16, 1e-5)])
def test_every_mode_gives_what_mlx_gives(tmp_path: Path, mode: str, bits: int, group: int, most: float) -> None:
    """What is widened to halves to what those hold."""
    assert compared(tmp_path, "llama", mode, bits, group) < most


def test_all_that_run_were_compared() -> None:
    assert {*CASES} == {*MLX_FAMILIES}
