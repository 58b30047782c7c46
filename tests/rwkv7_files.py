"""GGUF files of RWKV 7 for tests, in the layout of llama.cpp's converter: one tensor for all token shift weights, an unused value residual
in the first layer, and names and keys from the gguf package."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

NAMES = {"attn_norm": "attn_norm", "ffn_norm": "attn_norm_2", "attn.g_norm": "time_mix_ln", "attn.r_proj": "time_mix_receptance",
         "attn.k_proj": "time_mix_key", "attn.v_proj": "time_mix_value", "attn.o_proj": "time_mix_output", "ffn.key": "channel_mix_key",
         "ffn.value": "channel_mix_value"}
LOW = {"0.weight": "1", "2.weight": "2", "2.bias": "0"}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """By name in a file, float32."""
    found = {name: values.float().numpy() for name, values in load_file(folder / "model.safetensors").items()}
    made = {"token_embd.weight": found["model.embeddings.weight"]}
    for kind in ("weight", "bias"):
        made[f"token_embd_norm.{kind}"] = found[f"model.layers.0.pre_norm.{kind}"]
        made[f"output_norm.{kind}"] = found[f"model.norm.{kind}"]
    if "lm_head.weight" in found:
        made["output.weight"] = found["lm_head.weight"]
    for layer in range(json.loads((folder / "config.json").read_text())["num_hidden_layers"]):
        before, after = f"model.layers.{layer}.", f"blk.{layer}."
        for own, name in NAMES.items():
            made |= {f"{after}{name}.{kind}": found[f"{before}{own}.{kind}"] for kind in ("weight", "bias")
                     if f"{before}{own}.{kind}" in found}
        for letter in "wavg":
            there = "a" if letter == "v" and not layer else letter  # something in the place of what is not read
            inside = f"{before}attn.{there}_lora.lora."
            made |= {f"{after}time_mix_{letter}{number}.weight": found[inside + own] for own, number in LOW.items()
                     if inside + own in found}
        made |= {f"{after}time_mix_{name}.weight": found[f"{before}attn.{name}"].reshape(-1) for name in ("k_k", "k_a", "r_k")}
        made[f"{after}channel_mix_lerp_k.weight"] = found[f"{before}ffn.x_k"]
        made[f"{after}time_mix_lerp_fused.weight"] = np.stack([found[f"{before}attn.x_{letter}"] for letter in "rwkvag"])
    return made


def file_of(folder: Path, path: Path, kind: str = "F32", changes: Mapping[str, object] | None = None, vocabulary: bool = False) -> Path:
    """The model of a folder as a file, its large matrices of a type; `changes`: keys to state otherwise, None for one to leave out.
    `vocabulary`: with the `vocabulary` of `rwkv_vocabulary.py`."""
    raw = json.loads((folder / "config.json").read_text())
    keys = {"context_length": 1 << 20, "embedding_length": raw["hidden_size"], "block_count": raw["num_hidden_layers"],
            "feed_forward_length": raw["intermediate_size"], "attention.head_count": 0, "attention.layer_norm_epsilon": raw["norm_eps"],
            "wkv.head_size": raw["head_dim"], "attention.decay_lora_rank": raw["decay_low_rank_dim"],
            "attention.iclr_lora_rank": raw["a_low_rank_dim"], "attention.value_residual_mix_lora_rank": raw["v_low_rank_dim"],
            "attention.gate_lora_rank": raw["gate_low_rank_dim"]} | dict(changes or {})
    writer = gguf.GGUFWriter(path, "rwkv7")
    for key, value in keys.items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"rwkv7.{key}", value)
    if vocabulary:
        from rwkv_vocabulary import add_vocabulary

        add_vocabulary(writer, raw["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_uint32("rwkv7.vocab_size", raw["vocab_size"])
    for name, values in tensors_of(folder).items():
        small = values.ndim != 2 or any(part in name for part in ("_w1", "_w2", "_a1", "_a2", "_v1", "_v2", "_g1", "_g2"))
        stored = gguf.GGMLQuantizationType.F32 if small else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
