"""GGUF files as written by Ollama's own converter: a vision model in a single file, with that converter's keys and tensor names."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from mmproj_files import TOWER_PREFIXES, add_key, write_pair
from safetensors.torch import load_file

# Family -> the architecture, and how parts of names in a checkpoint become those of the file, in this order.
_ATTENTION = (("self_attn.", "attn_"), ("attention.", "attn_"), ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "output"),
              ("o_proj", "output"))
_FFN = (("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"))
WRITTEN = {
    "gemma3": ("gemma3", (("vision_tower.embeddings", "v"), ("vision_tower", "v"), ("encoder.layers", "blk"), *_ATTENTION,
                          ("input_projection_weight", "input_projection.weight"), ("multi_modal_projector", "mm"))),
    "mistral3": ("mistral3", (("vision_tower", "v"), ("transformer.layers", "blk"), ("ln_pre", "encoder_norm"),
                              ("attention_norm", "attn_norm"), ("feed_forward", "mlp"), *_ATTENTION, *_FFN,
                              ("multi_modal_projector", "mm"))),
    "qwen2_5_vl": ("qwen25vl", (("visual", "v"), ("blocks", "blk"), ("attn.proj", "attn_out"), ("norm1", "ln1"), ("norm2", "ln2"), *_FFN)),
}
LEFT_AWAY = {"gemma3": ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "attention.sliding_window_pattern")}


def write_one(folder: Path, out: Path, **keys: object) -> Path:
    """A vision model's folder as one file below `out`; `keys`: others after the architecture's name, None omits one."""
    config = json.loads((folder / "config.json").read_text())
    arch, names = WRITTEN[config["model_type"]]
    pair, _ = write_pair(folder, out)
    reader, path = gguf.GGUFReader(pair), out / "one" / "model.gguf"
    path.parent.mkdir()
    writer, before = gguf.GGUFWriter(path, arch), reader.fields["general.architecture"].contents()
    stated = {}
    for key, found in reader.fields.items():
        if key.startswith(("GGUF.", "general.architecture")) or key == "tokenizer.chat_template":
            continue
        inner = key.removeprefix(f"{before}.") if key.startswith(f"{before}.") else None
        if inner not in LEFT_AWAY.get(arch, ()):
            stated[key if inner is None else f"{arch}.{inner}"] = found.contents()
    ready = json.loads((folder / "preprocessor_config.json").read_text())
    looks = {f"vision.{name}": ready[name] for name in ("image_mean", "image_std")}  # tests have others than what is taken for granted
    if arch == "qwen25vl":
        looks |= {"vision.image_min_pixels": ready["size"]["shortest_edge"], "vision.image_max_pixels": ready["size"]["longest_edge"]}
    keys = {**looks, **keys}
    for key, value in {**stated, **{f"{arch}.{key}": value for key, value in {**_keys(arch, config), **keys}.items()}}.items():
        if value is not None:
            add_key(writer, key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data).reshape(tuple(int(each) for each in tensor.shape[::-1])))
    for name, values in load_file(folder / "model.safetensors").items():
        own = name.removeprefix("model.")
        if own.startswith(TOWER_PREFIXES):
            for theirs, parts in _parts(own, values.to(torch.float32).numpy(), arch):
                for old, new in names:
                    theirs = theirs.replace(old, new)
                writer.add_tensor(theirs, np.ascontiguousarray(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(arch: str, config: dict) -> dict[str, object]:
    vision = config["vision_config"]
    shared = {"vision.block_count": vision.get("num_hidden_layers", vision.get("depth")), "vision.embedding_length": vision["hidden_size"],
              "vision.attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
              "vision.patch_size": vision["patch_size"], "vision.num_channels": 3}
    if arch == "gemma3":
        return {**shared, "vision.feed_forward_length": vision["intermediate_size"], "vision.image_size": vision["image_size"],
                "vision.attention.layer_norm_epsilon": float(vision["layer_norm_eps"]),
                "mm.tokens_per_image": config["mm_tokens_per_image"]}
    if arch == "mistral3":
        return {**shared, "vision.feed_forward_length": vision["intermediate_size"], "vision.image_size": vision["image_size"],
                "vision.attention.key_length": vision["head_dim"], "vision.rope.freq_base": float(vision["rope_parameters"]["rope_theta"]),
                "image_token_index": 10, "spatial_merge_size": config["spatial_merge_size"], "mm.projector_bias": False,
                "mm.projector_hidden_act": "gelu"}
    return {**shared, "vision.spatial_merge_size": vision["spatial_merge_size"], "vision.window_size": vision["window_size"],
            "vision.spatial_patch_size": vision["patch_size"], "vision.attention.layer_norm_epsilon": 1e-6,
            "vision.rope.freq_base": 10000.0, "vision.fullatt_block_indexes": vision["fullatt_block_indexes"],
            "vision.temporal_patch_size": 2}


def _parts(own: str, values: np.ndarray, arch: str) -> list[tuple[str, np.ndarray]]:
    if arch == "gemma3" and own.endswith("_norm.weight"):
        return [(own, values + np.float32(1))]
    if arch == "qwen25vl" and "patch_embed.proj" in own:
        return [(own.replace("patch_embed.proj", f"patch_embd_{frame}"), values[:, :, frame]) for frame in (0, 1)]
    if arch == "qwen25vl" and ".qkv." in own:
        return [(own.replace("attn.qkv", f"attn_{letter}"), rows) for letter, rows in zip("qkv", np.split(values, 3), strict=True)]
    return [(own, values)]
