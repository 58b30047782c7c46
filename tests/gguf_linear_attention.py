"""GGUF files of models with linear attention as written by llama.cpp's converter, with value heads in tiled order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from family_models import Case
from gguf_samples import EXPERT, EXPERTS, LAYER, NAMES, ROUTER, TYPES, k_quant_blocks, weights

OWN = {**LAYER, **ROUTER, "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z":
       "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
       "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba":
       "ssm_ba"}
ARCH = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
# Heads of one width, as llama.cpp has them, three of values for each of keys, whose columns fill blocks of 256.
HEADS = {"num_hidden_layers": 5, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "hidden_size": 256, "intermediate_size": 256, "full_attention_interval": 3, "eos_token_id": None,
         "initializer_range": 0.08}
CASES = {"qwen3_5_text": Case("qwen3_5_text", {**HEADS, "tie_word_embeddings": True}),
         "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**HEADS, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 256,
                                                       "shared_expert_intermediate_size": 256})}


# As the first files of it are: what is joined in a checkpoint is joined.
NEXT = Case("qwen3_next", CASES["qwen3_5_moe_text"].changes)


def tiled(heads: dict[str, int], name: str, axis: int) -> np.ndarray | None:
    """Which row or column of a checkpoint each of a file is; None where they lie as they do there."""
    keys, values = heads["linear_num_key_heads"], heads["linear_num_value_heads"]
    depth, width = heads["linear_key_head_dim"], heads["linear_value_head_dim"]
    order = np.arange(values).reshape(keys, values // keys).T.reshape(-1)
    wide = (order[:, None] * width + np.arange(width)).reshape(-1)
    behind = np.concatenate([np.arange(2 * keys * depth), 2 * keys * depth + wide])
    _, _, part = name.partition("linear_attn.")
    if axis == 1:
        return wide if part == "out_proj.weight" else None
    return {"in_proj_qkv.weight": behind, "conv1d.weight": behind, "in_proj_z.weight": wide, "in_proj_a.weight": order,
            "in_proj_b.weight": order, "A_log": order, "dt_bias": order}.get(part)


def file_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, index, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    own = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.get(rest)
    return f"blk.{index}.{own or f'{OWN[part]}.{kind}'}"


def moved(values: np.ndarray, raw: dict[str, int], name: str, back: bool = False) -> np.ndarray:
    for axis in (0, 1):
        if (order := tiled(raw, name, axis)) is not None:
            values = np.take(values, np.argsort(order) if back else order, axis)
    return values


def stored(values: np.ndarray, raw: dict[str, int], name: str) -> np.ndarray:
    values = moved(values, raw, name)
    if name.endswith("A_log"):
        return -np.exp(values)
    if "conv1d" in name or "shared_expert_gate" in name:
        return values.squeeze()
    return values + np.float32(1) if name.endswith("norm.weight") and "linear_attn" not in name else values


def meant(values: np.ndarray, raw: dict[str, int], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("A_log"):
        values = np.log(-values)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values - np.float32(1)
    return moved(values.reshape(shape), raw, name, back=True)


def write(folder: Path, path: Path, kind: str = "F32", change: Callable[[gguf.GGUFWriter], None] | None = None,
          joint: bool = False, moves: bool = True) -> dict[str, np.ndarray]:
    """The model of `folder` with matrices of `kind`, gates and ups of experts in one tensor if `joint`; returns what its weights mean.
    Heads stay in the checkpoint's order unless `moves`."""
    raw = json.loads((folder / "config.json").read_text())
    one = {"linear_num_key_heads": 1, "linear_key_head_dim": raw["linear_num_key_heads"] * raw["linear_key_head_dim"]}
    heads = raw if moves else raw | one  # all read the same head, so that none moves
    rope = raw.get("rope_parameters") or raw
    writer = gguf.GGUFWriter(path, ARCH[raw["model_type"]])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    turned = int(raw["head_dim"] * rope.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_count(turned)
    writer.add_rope_dimension_sections([-(-turned // 2 // 3), -(-(turned // 2 - 1) // 3), (turned // 2) // 3, 0])
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
    writer.add_ssm_inner_size(raw["linear_value_head_dim"] * raw["linear_num_value_heads"])
    writer.add_full_attention_interval(raw.get("full_attention_interval") or raw["layer_types"].index("full_attention") + 1)
    if "num_experts" in raw:
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(raw["intermediate_size"])
    if change is not None:
        change(writer)
    found, experts = {}, {}

    def add(name: str, rows: np.ndarray) -> np.ndarray:
        own = TYPES[kind if rows.ndim > 1 and "ffn_gate_inp" not in name and "conv1d" not in name else "F32"]
        flat = rows.reshape(-1, rows.shape[-1])
        data = k_quant_blocks(flat, own.name).reshape(*rows.shape[:-1], -1) if own.name.endswith("_K") else gguf.quants.quantize(rows, own)
        writer.add_tensor(name, data, raw_dtype=own)
        return gguf.quants.dequantize(data, own).reshape(rows.shape)

    for name, values in weights(folder).items():
        if each := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{each[1].rpartition('.')[2]}.{EXPERTS[each[3]]}.weight", {})[int(each[2])] = (name, values)
        else:
            found[name] = meant(add(file_name(name), stored(values, heads, name)), heads, name, values.shape)
    for name, own in experts.items():
        if joint and "_up_" in name:
            continue
        sides = [own, experts[name.replace("_gate_", "_up_")]] if joint and "_gate_" in name else [own]
        rows = np.stack([np.concatenate([side[number][1] for side in sides]) for number in range(len(own))])
        back = add(name.replace("ffn_gate_exps", "ffn_gate_up_exps") if len(sides) > 1 else name, rows)
        for number in range(len(own)):
            found |= {side[number][0]: part for side, part in zip(sides, np.split(back[number], len(sides)), strict=True)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
