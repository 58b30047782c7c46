"""GGUF file pairs of a vision model's folder, as llama.cpp's converters write them: the text model, and the vision encoder (mmproj). Tensor
names are those of the `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from command_line import run_cli
from gguf_samples import interleaved, write_model
from remapped_checkpoints import PUBLISHED_LAYOUTS
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from vision_cases import CASES, ROPE
from vision_models import FIRST, KimiProcessor, Lfm2Processor, Llama4Processor, fast_tokenizer, save_vision_model

from effllm.runtime.config import read_config
from effllm.runtime.gguf.export import _tokenizer

# Family -> the architecture of its text model's file, and the type of its projector.
PAIRS = {"exaone4_5": ("exaone4", "exaone4_5"), "glm5_next": ("glm5-next", "glm5v"),
         "gemma3": ("gemma3", "gemma3"), "idefics3": ("llama", "idefics3"), "smolvlm": ("llama", "idefics3"), "llava": ("llama", "mlp"),
         "llava_next": ("llama", "mlp"), "mistral3": ("llama", "pixtral"), "internvl": ("qwen2", "internvl"),
         "glm4v": ("glm4", "glm4v"), "glm4v_moe": ("glm4moe", "glm4v"), "glm_ocr": ("glm4", "glm4v"), "kimi_k25": ("deepseek2", "kimik25"),
         "llama4": ("llama4", "llama4"), "minicpmv4_6": ("qwen35", "minicpmv4_6"), "lfm2_vl": ("lfm2", "lfm2"),
         "lighton_ocr": ("qwen3", "lightonocr"), "paddleocr_vl": ("paddleocr", "paddleocr"),
         "hunyuan_vl": ("hunyuan_vl", "hunyuanvl"), "qwen2_vl": ("qwen2vl", "qwen2vl_merger"),
         "qwen2_5_vl": ("qwen2vl", "qwen2.5vl_merger"), "qwen3_vl": ("qwen3vl", "qwen3vl_merger")}
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
TOWER_PREFIXES = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "mm_projector.",
                  "merger.", "mlp_AR.", "vit.")
INTERNVL_PROJECTOR = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
LLAVA_NAMES = {"vision_tower.": "v.", "encoder.layers": "blk", "embeddings.": "", "embedding": "embd", "self_attn.": "attn_", "_proj": "",
               "layer_norm": "ln", "mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up", "layrnorm": "ln", "post_layernorm": "post_ln"}
LLAVA_PROJECTOR = {"linear_1": "0", "linear_2": "2"}
MINICPM_MERGER = {"layer_norm1": "ln1", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
                  "self_attn.out_proj": "attn_out", "pre_norm": "ds_ln", "linear_1": "ds_ffn_up", "linear_2": "ds_ffn_down"}
MINICPM_PROJECTOR = {"pre_norm": "mm.input_norm", "linear_1": "mm.up", "linear_2": "mm.down"}
# Settings that mmproj files do not state: those of published folders.
GLM = Glm4vImageProcessorPil(patch_size=8, size={"shortest_edge": 12_544, "longest_edge": 9_633_792})
LLAMA4 = ({"model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 2, "interleave_moe_layer_step": 2},
          {"hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
           "projector_input_dim": 56, "projector_output_dim": 56, "vision_output_dim": 56},
          ["<|patch|>", "<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>"],
          {"image_token_index": FIRST}, Llama4Processor())
GLM4V_MOE_TEXT = {"model_type": "glm4v_moe_text", "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
                  "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
                  "first_k_dense_replace": 1}
VISION_CASES = {**CASES, "exaone4_5": ({"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
                                       *CASES["exaone4_5"][1:]),
                **{family: (*CASES[family][:-1], GLM) for family in ("glm4v", "glm_ocr")},
                "paddleocr_vl": ({**CASES["paddleocr_vl"][0], "use_bias": False}, *CASES["paddleocr_vl"][1:]),
                "glm4v_moe": (GLM4V_MOE_TEXT, *CASES["glm4v"][1:-1], GLM),
                "kimi_k25": (*CASES["kimi_k25"][:-1],
                             KimiProcessor(patch_size=8, max_patches=120, size={"max_height": 512, "max_width": 512})),
                "llama4": LLAMA4,
                "minicpmv4_6": (*CASES["minicpmv4_6"][:-1], MiniCPMV4_6ImageProcessorPil(scale_resolution=64, patch_size=8)),
                "lfm2_vl": (*CASES["lfm2_vl"][:-1], Lfm2Processor(tile_size=512, max_tiles=10, min_image_tokens=64, max_image_tokens=256))}
EXPORTED = ("deepseek2", "exaone4", "glm4", "glm5-next", "glm4moe", "lfm2", "llama4", "qwen35")  # text models that `effllm export` writes
HALF_MEAN = [0.5] * 3


def save_as_published(folder: Path, family: str, **tower: object) -> PreTrainedModel:
    """Save the model of a family of PAIRS under published tensor names."""
    model = save_vision_model(folder, family, VISION_CASES[family], **tower)
    if family in PUBLISHED_LAYOUTS:
        PUBLISHED_LAYOUTS[family](folder)
    return model


def write_pair(folder: Path, out: Path, kind: str = "F32", name: str = "mmproj-model-f16.gguf", **keys: object) -> tuple[Path, Path]:
    """Write the text model and the mmproj file of `folder` to `out`; returns their paths.

    kind: GGML type of the tower's matrices.
    keys: projector metadata to change, by name after `clip.`; None omits a key.
    """
    out.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    arch, projector = PAIRS[config["model_type"]]
    _write_text(folder, out / "model-Q8_0.gguf", arch, config)
    write_projector(folder, out / name, projector, config, kind, keys)
    return out / "model-Q8_0.gguf", out / name


def _write_text(folder: Path, path: Path, arch: str, config: Mapping[str, object]) -> None:
    if arch in EXPORTED:
        code, _, err = run_cli("export", folder, "-o", path)
        assert code == 0, err
        return
    raw = dict(config["text_config"])
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    text_path = path.parent / "text"
    text_path.mkdir()
    (text_path / "config.json").write_text(json.dumps({**raw, "rope_theta": rope.get("rope_theta", 10000.0)}))
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if any(_common_name(name).startswith(prefix) for prefix in TOWER_PREFIXES):
            continue
        old_prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), None)
        tensors["lm_head.weight" if name.endswith("lm_head.weight") else "model." + name.removeprefix(old_prefix)] = values
    save_file(tensors, text_path / "model.safetensors")

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in _tokenizer(folder, read_config(folder)).items():
            add_key(writer, key, value)
        if arch == "hunyuan_vl":
            writer.add_array(f"{arch}.rope.dimension_sections", rope["mrope_section"])
            writer.add_float32(f"{arch}.rope.scaling.alpha", rope["alpha"])
        elif "mrope_section" in rope:
            writer.add_array(f"{arch}.rope.dimension_sections", [*rope["mrope_section"], 0])
        if arch == "qwen3vl":
            writer.add_uint32("qwen3vl.n_deepstack_layers", len(config["vision_config"]["deepstack_visual_indexes"]))
        if arch == "gemma3":
            writer.add_sliding_window(raw["sliding_window"])

    write_model(text_path, path, "F32", arch, change=change)


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))


def write_projector(folder: Path, path: Path, projector: str, config: Mapping[str, object], kind: str = "F32",
                    keys: Mapping[str, object] = {}) -> None:
    vision = config["vision_config"]
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    metadata = {"projector_type": projector, "has_vision_encoder": True, **_shape(vision, config),
                **_projector_keys(projector, config, vision, processor), "vision.image_mean": processor.get("image_mean", HALF_MEAN),
                "vision.image_std": processor.get("image_std", HALF_MEAN), **keys}
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in metadata.items():
        if value is not None:
            add_key(writer, f"clip.{key}", value)
    for name, values in _tensors(folder, projector, config, int(metadata["vision.block_count"])):
        tensor_type = gguf.GGMLQuantizationType[kind if values.ndim == 2 and values.shape[-1] % 32 == 0 else "F32" if kind == "Q8_0"
                                                else kind
                                                if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape(vision: Mapping[str, object], config: Mapping[str, object]) -> dict[str, object]:
    def of(*names: str) -> object:
        value = next(vision[name] for name in names if name in vision)
        return value[0] if isinstance(value, list) else value

    patch, width = of("patch_size"), of("embed_dim", "hidden_size")  # the second is the text model's where both are there
    grid_side = int(vision.get("num_position_embeddings", 1600) ** 0.5)
    image_size = of("image_size") if "image_size" in vision else 256 if "num_patches" in vision else grid_side * patch
    return {"vision.image_size": image_size, "vision.patch_size": patch, "vision.embedding_length": width,
            "vision.feed_forward_length": vision.get("intermediate_size", width * vision.get("mlp_ratio", 0)),
            "vision.block_count": of("num_hidden_layers", "depth"),
            "vision.attention.head_count": of("num_attention_heads", "num_heads"),
            "vision.projection_dim": config["text_config"]["hidden_size"],
            "vision.attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", {"pixtral": 1e-5}.get(vision["model_type"], 1e-6)))}


def _projector_keys(projector: str, config: Mapping[str, object], vision: Mapping[str, object],
                    processor: Mapping[str, object]) -> dict[str, object]:
    activation = {"use_silu": True} if vision.get("hidden_act") == "silu" else {"use_gelu": True}
    if projector == "mlp":
        feature_layers = config["vision_feature_layer"]
        layer = max(feature_layers) if isinstance(feature_layers, list) else feature_layers
        pinpoints = [side for height, width in config.get("image_grid_pinpoints") or () for side in (width, height)]
        return {"use_gelu": vision["hidden_act"] != "quick_gelu", "has_llava_projector": True,
                "vision.projection_dim": vision.get("projection_dim", 768),
                "vision.block_count": vision["num_hidden_layers"] + 1 + layer, "vision.image_grid_pinpoints": pinpoints or None,
                "vision.mm_patch_merge_type": "spatial_unpad" if pinpoints else None}
    if projector == "idefics3":
        return {**activation, "vision.projector.scale_factor": config["scale_factor"],
                "vision.preproc_image_size": processor["size"]["longest_edge"]}
    if projector in ("pixtral", "lightonocr"):
        return {**activation, "vision.spatial_merge_size": config["spatial_merge_size"]}
    if projector == "internvl":
        return {**activation, "vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
                "vision.preproc_min_tiles": processor["min_patches"], "vision.preproc_max_tiles": processor["max_patches"]}
    if projector == "gemma3":
        patches_per_side = vision["image_size"] // vision["patch_size"]
        return {**activation, "vision.projector.scale_factor": patches_per_side // int(config["mm_tokens_per_image"] ** 0.5)}
    if projector == "lfm2":
        return {**activation, "vision.projector.scale_factor": 2}
    if projector == "glm4v":
        return {**activation, "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"]}
    if projector == "glm5v":
        unit = (2 * vision["patch_size"]) ** 2
        return {**activation, "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"], "vision.spatial_merge_size": 2,
                "vision.swiglu_clamp": vision["swiglu_limit"], "vision.image_min_pixels": processor["min_image_tokens"] * unit,
                "vision.image_max_pixels": processor["max_image_tokens"] * unit}
    if projector == "llama4":
        merge = int(1 / vision["pixel_shuffle_ratio"])
        return {**activation, "vision.attention.layer_norm_epsilon": 1e-5, "vision.projector.scale_factor": merge}
    if projector == "kimivl":
        return {**activation, "vision.attention.layer_norm_epsilon": 1e-5, "vision.projector.scale_factor": vision["merge_kernel_size"][0],
                "vision.image_size": vision["init_pos_emb_height"] * vision["patch_size"]}
    if projector == "kimik25":
        patch = vision["patch_size"] ** 2
        return {**activation, "vision.attention.layer_norm_epsilon": 1e-5, "vision.projector.scale_factor": vision["merge_kernel_size"][0],
                "vision.image_size": vision["pos_emb_height"] * vision["patch_size"], "vision.image_min_pixels": 8 * patch,
                "vision.image_max_pixels": processor["max_patches"] * patch}
    if projector == "minicpmv4_6":
        return {**activation, "vision.projector.scale_factor": 4, "vision.wa_layer_indexes": [config["insert_layer_id"]],
                "vision.image_size": processor["scale_resolution"]}
    if projector == "paddleocr":
        activation["vision.image_size"] = int(processor["size"]["longest_edge"] ** 0.5)
    pixel_limits = {"vision.image_min_pixels": processor["size"]["shortest_edge"],
                    "vision.image_max_pixels": processor["size"]["longest_edge"]}
    if projector == "hunyuanvl":
        return {**activation, **pixel_limits, "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"], "vision.image_size":
                vision["max_image_size"], "vision.spatial_merge_size": vision["spatial_merge_size"]}
    if projector in ("exaone4_5", "qwen2.5vl_merger"):
        interval = vision["fullatt_block_indexes"][0] + 1
        kv_heads = {"vision.attention.head_count_kv": vision.get("num_key_value_heads")}
        return {**activation, **pixel_limits, **kv_heads, "vision.n_wa_pattern": interval, "vision.window_size": vision["window_size"]}
    if projector in ("paddleocr", "qwen2vl_merger"):
        return {**activation, **pixel_limits} if projector == "paddleocr" else pixel_limits
    is_deepstack = [number in vision["deepstack_visual_indexes"] for number in range(vision["depth"])]
    return {**activation, **pixel_limits, "vision.spatial_merge_size": vision["spatial_merge_size"],
            "vision.is_deepstack_layers": is_deepstack}


def _tensors(folder: Path, projector: str, config: Mapping[str, object], blocks: int) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    for name, values in load_file(folder / "model.safetensors").items():
        key = _common_name(name)
        if projector == "pixtral" and key.endswith("embed_tokens.weight"):  # llama.cpp ends rows of patches with this embedding
            yield "v.token_embd.img_break", values[fast_tokenizer(folder).convert_tokens_to_ids("[IMG_BREAK]")].to(torch.float32).numpy()
        if key.startswith(TOWER_PREFIXES):
            yield from _mmproj_tensors(key, values.to(torch.float32).numpy(), projector, config, names, blocks)


def _common_name(name: str) -> str:
    """The vision encoder's tensor names in most families; converters normalize to these first."""
    key = name.removeprefix("model.").replace("vision_encoder.", "vision_tower.").replace("vision_projection.", "multi_modal_projector.")
    return key.replace("encoder.patch_embed.", "patch_embed.")


def _mmproj_tensors(key: str, values: np.ndarray, projector: str, config: Mapping[str, object], names: gguf.TensorNameMap,
                    blocks: int) -> Iterator[tuple[str, np.ndarray]]:
    if projector == "mlp":
        yield from _llava_tensors(key, values, blocks)
        return
    vision = config["vision_config"]
    if projector == "gemma3":
        key = key.replace("vision_tower.", "vision_tower.vision_model.").replace("projection_weight", "projection.weight")
        values = values + np.float32(1) if "soft_emb_norm" in key else values
    if projector == "idefics3":
        key = "model." + key
    if projector in ("pixtral", "lightonocr") and key.endswith(("q_proj.weight", "k_proj.weight")):
        values = interleaved(values, vision["num_attention_heads"])
    if projector == "internvl":
        part = key.split(".")[-2]
        if key.startswith("multi_modal_projector."):
            yield f"mm.model.mlp.{INTERNVL_PROJECTOR[part]}.{key.rpartition('.')[2]}", values
            return
        key = "model." + key + (".weight" if ".lambda_" in key or "position_embeddings" in key else "")
    if projector == "lfm2":
        key = key.replace("vision_model.", "").replace("vision_tower.", "vision_tower.vision_model.")
        if key.endswith("patch_embedding.weight"):
            patch = vision["patch_size"]
            values = values.reshape(len(values), patch, patch, 3).transpose(0, 3, 1, 2)
    if projector == "llama4":
        if key.startswith("multi_modal_projector."):
            yield "mm.model.fc.weight", values
            return
        key += ".weight" * key.endswith("positional_embedding_vlm")
    if projector == "kimik25":
        key = key.replace("proj.0.", "proj.linear_1.").replace("proj.2.", "proj.linear_2.")
        values = split_rope_axes(values, vision["num_attention_heads"]) if ".wqkv." in key else values
    if projector == "kimivl":
        values = values.reshape(-1, values.shape[-1]) if ".pos_emb." in key else values
    if ".wqkv." in key and projector == "kimivl":
        for letter, rows in zip("qkv", np.split(values, 3), strict=True):
            yield names.get_name(key.replace("wqkv", f"w{letter}"), (".weight", ".bias")), rows
        return
    if projector == "minicpmv4_6":
        stem, _, kind = key.rpartition(".")
        for prefix, names_of, new_prefix in (("vision_tower.vit_merger.", MINICPM_MERGER, "v.vit_merger."),
                                             ("merger.mlp.0.", MINICPM_PROJECTOR, "")):
            if key.startswith(prefix):
                yield f"{new_prefix}{names_of[stem.removeprefix(prefix)]}.{kind}", values
                return
        key = key.replace("vision_tower.", "vision_tower.vision_model.")
    if projector == "hunyuanvl" and "position_embedding" in key:
        values = values[1:]
    if projector == "paddleocr":
        key = key.replace("visual.", "model.")
    if ".qkv." in key and projector in ("qwen2vl_merger", "qwen2.5vl_merger"):
        for letter, rows in zip("qkv", np.split(values, 3), strict=True):
            yield names.get_name(key.replace("qkv", letter), (".weight", ".bias")), rows
        return
    if key == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
        return
    if ".deepstack_merger_list." in key:
        _, _, index, part, kind = key.split(".")
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(index)]}.{part.removeprefix('linear_')}.{kind}", values
        return
    if key.startswith("visual.merger.") and projector == "qwen3vl_merger":
        _, _, part, kind = key.split(".")
        yield f"{ {'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2', 'norm': 'v.post_ln'}[part]}.{kind}", values
        return
    name = names.get_name(key, (".weight", ".bias"))
    assert name is not None, key
    yield name, values


def split_rope_axes(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k whose rotary pairs alternate between column and row positions, reordered so that column pairs come first in each
    head."""
    queries, keys, rest = np.split(values, 3)
    return np.concatenate([*(rows.reshape(heads, -1, 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape) for rows in (queries, keys)),
                           rest])


def _llava_tensors(key: str, values: np.ndarray, blocks: int) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of the older LLaVA converter, which swaps the FFN's two matrices and omits unused layers."""
    if key == "image_newline":
        yield "model.image_newline", values
    elif key.startswith("multi_modal_projector."):
        _, part, kind = key.split(".")
        yield f"mm.{LLAVA_PROJECTOR[part]}.{kind}", values
    elif "post_layernorm" not in key and (".layers." not in key or int(key.split(".")[3]) < blocks):
        for hf_part, gguf_part in LLAVA_NAMES.items():
            key = key.replace(hf_part, gguf_part)
        if not key.startswith("v.post_ln"):
            yield key, values
