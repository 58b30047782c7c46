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
from remapped_checkpoints import RETOLD
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from vision_cases import CASES, ROPE
from vision_models import FIRST, KimiReady, Lfm2Ready, Llama4Ready, seeing, words_of

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
OF_TEXT = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
OF_TOWER = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "mm_projector.",
            "merger.", "mlp_AR.", "vit.")
INTERNVL = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
EARLY = {"vision_tower.": "v.", "encoder.layers": "blk", "embeddings.": "", "embedding": "embd", "self_attn.": "attn_", "_proj": "",
         "layer_norm": "ln", "mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up", "layrnorm": "ln", "post_layernorm": "post_ln"}
LLAVA = {"linear_1": "0", "linear_2": "2"}
IN_MINICPM = {"layer_norm1": "ln1", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.out_proj": "attn_out", "pre_norm": "ds_ln", "linear_1": "ds_ffn_up", "linear_2": "ds_ffn_down"}
BEHIND_MINICPM = {"pre_norm": "mm.input_norm", "linear_1": "mm.up", "linear_2": "mm.down"}
# What files do not state is as in published folders.
GLM = Glm4vImageProcessorPil(patch_size=8, size={"shortest_edge": 12_544, "longest_edge": 9_633_792})
LLAMA4 = ({"model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 2, "interleave_moe_layer_step": 2},
          {"hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
           "projector_input_dim": 56, "projector_output_dim": 56, "vision_output_dim": 56},
          ["<|patch|>", "<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>"],
          {"image_token_index": FIRST}, Llama4Ready())
MIXED = {"model_type": "glm4v_moe_text", "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
         "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
SEEN_BY = {**CASES, "exaone4_5": ({"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
                                  *CASES["exaone4_5"][1:]),
           **{family: (*CASES[family][:-1], GLM) for family in ("glm4v", "glm_ocr")},
           "paddleocr_vl": ({**CASES["paddleocr_vl"][0], "use_bias": False}, *CASES["paddleocr_vl"][1:]),
           "glm4v_moe": (MIXED, *CASES["glm4v"][1:-1], GLM),
           "kimi_k25": (*CASES["kimi_k25"][:-1], KimiReady(patch_size=8, max_patches=120, size={"max_height": 512, "max_width": 512})),
           "llama4": LLAMA4, "minicpmv4_6": (*CASES["minicpmv4_6"][:-1], MiniCPMV4_6ImageProcessorPil(scale_resolution=64, patch_size=8)),
           "lfm2_vl": (*CASES["lfm2_vl"][:-1], Lfm2Ready(tile_size=512, max_tiles=10, min_image_tokens=64, max_image_tokens=256))}
EXPORTED = ("deepseek2", "exaone4", "glm4", "glm5-next", "glm4moe", "lfm2", "llama4", "qwen35")  # whose text models an export writes
HALF = [0.5] * 3


def seeing_as_published(folder: Path, family: str, **tower: object) -> PreTrainedModel:
    """The model of a family of PAIRS, written to `folder` with the names of published ones."""
    model = seeing(folder, family, SEEN_BY[family], **tower)
    if family in RETOLD:
        RETOLD[family](folder)
    return model


def write_pair(folder: Path, out: Path, kind: str = "F32", name: str = "mmproj-model-f16.gguf", **keys: object) -> tuple[Path, Path]:
    """The two files, in `out`; `kind` of the tower's matrices. `keys`: others of the projector by their names behind `clip.`; None leaves
    one out."""
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
        if any(_usual(name).startswith(prefix) for prefix in OF_TOWER):
            continue
        before = next((prefix for prefix in OF_TEXT if name.startswith(prefix)), None)
        tensors["lm_head.weight" if name.endswith("lm_head.weight") else "model." + name.removeprefix(before)] = values
    save_file(tensors, text_path / "model.safetensors")

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in _tokenizer(folder, read_config(folder)).items():
            put(writer, key, value)
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


def put(writer: gguf.GGUFWriter, key: str, value: object) -> None:
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
    stated = {"projector_type": projector, "has_vision_encoder": True, **_shape(vision, config),
              **_more(projector, config, vision, processor), "vision.image_mean": processor.get("image_mean", HALF),
              "vision.image_std": processor.get("image_std", HALF), **keys}
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in stated.items():
        if value is not None:
            put(writer, f"clip.{key}", value)
    for name, values in _tensors(folder, projector, config, int(stated["vision.block_count"])):
        own = gguf.GGMLQuantizationType[kind if values.ndim == 2 and values.shape[-1] % 32 == 0 else "F32" if kind == "Q8_0" else kind
                                        if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape(vision: Mapping[str, object], config: Mapping[str, object]) -> dict[str, object]:
    def of(*names: str) -> object:
        value = next(vision[name] for name in names if name in vision)
        return value[0] if isinstance(value, list) else value

    patch, width = of("patch_size"), of("embed_dim", "hidden_size")  # the second is the text model's where both are there
    places = int(vision.get("num_position_embeddings", 1600) ** 0.5)
    side = of("image_size") if "image_size" in vision else 256 if "num_patches" in vision else places * patch
    return {"vision.image_size": side, "vision.patch_size": patch, "vision.embedding_length": width,
            "vision.feed_forward_length": vision.get("intermediate_size", width * vision.get("mlp_ratio", 0)),
            "vision.block_count": of("num_hidden_layers", "depth"),
            "vision.attention.head_count": of("num_attention_heads", "num_heads"),
            "vision.projection_dim": config["text_config"]["hidden_size"],
            "vision.attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", {"pixtral": 1e-5}.get(vision["model_type"], 1e-6)))}


def _more(projector: str, config: Mapping[str, object], vision: Mapping[str, object], processor: Mapping[str, object]) -> dict[str, object]:
    curve = {"use_silu": True} if vision.get("hidden_act") == "silu" else {"use_gelu": True}
    if projector == "mlp":
        stated = config["vision_feature_layer"]
        layer = max(stated) if isinstance(stated, list) else stated
        pinpoints = [side for high, wide in config.get("image_grid_pinpoints") or () for side in (wide, high)]
        return {"use_gelu": vision["hidden_act"] != "quick_gelu", "has_llava_projector": True,
                "vision.projection_dim": vision.get("projection_dim", 768),
                "vision.block_count": vision["num_hidden_layers"] + 1 + layer, "vision.image_grid_pinpoints": pinpoints or None,
                "vision.mm_patch_merge_type": "spatial_unpad" if pinpoints else None}
    if projector == "idefics3":
        return {**curve, "vision.projector.scale_factor": config["scale_factor"],
                "vision.preproc_image_size": processor["size"]["longest_edge"]}
    if projector in ("pixtral", "lightonocr"):
        return {**curve, "vision.spatial_merge_size": config["spatial_merge_size"]}
    if projector == "internvl":
        return {**curve, "vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
                "vision.preproc_min_tiles": processor["min_patches"], "vision.preproc_max_tiles": processor["max_patches"]}
    if projector == "gemma3":
        across = vision["image_size"] // vision["patch_size"]
        return {**curve, "vision.projector.scale_factor": across // int(config["mm_tokens_per_image"] ** 0.5)}
    if projector == "lfm2":
        return {**curve, "vision.projector.scale_factor": 2}
    if projector == "glm4v":
        return {**curve, "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"]}
    if projector == "glm5v":
        unit = (2 * vision["patch_size"]) ** 2
        return {**curve, "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"], "vision.spatial_merge_size": 2,
                "vision.swiglu_clamp": vision["swiglu_limit"], "vision.image_min_pixels": processor["min_image_tokens"] * unit,
                "vision.image_max_pixels": processor["max_image_tokens"] * unit}
    if projector == "llama4":
        merge = int(1 / vision["pixel_shuffle_ratio"])
        return {**curve, "vision.attention.layer_norm_epsilon": 1e-5, "vision.projector.scale_factor": merge}
    if projector == "kimivl":
        return {**curve, "vision.attention.layer_norm_epsilon": 1e-5, "vision.projector.scale_factor": vision["merge_kernel_size"][0],
                "vision.image_size": vision["init_pos_emb_height"] * vision["patch_size"]}
    if projector == "kimik25":
        patch = vision["patch_size"] ** 2
        return {**curve, "vision.attention.layer_norm_epsilon": 1e-5, "vision.projector.scale_factor": vision["merge_kernel_size"][0],
                "vision.image_size": vision["pos_emb_height"] * vision["patch_size"], "vision.image_min_pixels": 8 * patch,
                "vision.image_max_pixels": processor["max_patches"] * patch}
    if projector == "minicpmv4_6":
        return {**curve, "vision.projector.scale_factor": 4, "vision.wa_layer_indexes": [config["insert_layer_id"]],
                "vision.image_size": processor["scale_resolution"]}
    if projector == "paddleocr":
        curve["vision.image_size"] = int(processor["size"]["longest_edge"] ** 0.5)
    points = {"vision.image_min_pixels": processor["size"]["shortest_edge"], "vision.image_max_pixels": processor["size"]["longest_edge"]}
    if projector == "hunyuanvl":
        return {**curve, **points, "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"], "vision.image_size":
                vision["max_image_size"], "vision.spatial_merge_size": vision["spatial_merge_size"]}
    if projector in ("exaone4_5", "qwen2.5vl_merger"):
        interval = vision["fullatt_block_indexes"][0] + 1
        grouped = {"vision.attention.head_count_kv": vision.get("num_key_value_heads")}
        return {**curve, **points, **grouped, "vision.n_wa_pattern": interval, "vision.window_size": vision["window_size"]}
    if projector in ("paddleocr", "qwen2vl_merger"):
        return {**curve, **points} if projector == "paddleocr" else points
    deep = [number in vision["deepstack_visual_indexes"] for number in range(vision["depth"])]
    return {**curve, **points, "vision.spatial_merge_size": vision["spatial_merge_size"], "vision.is_deepstack_layers": deep}


def _tensors(folder: Path, projector: str, config: Mapping[str, object], blocks: int) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    for name, values in load_file(folder / "model.safetensors").items():
        own = _usual(name)
        if projector == "pixtral" and own.endswith("embed_tokens.weight"):  # llama.cpp takes the end of a line from here
            yield "v.token_embd.img_break", values[words_of(folder).convert_tokens_to_ids("[IMG_BREAK]")].to(torch.float32).numpy()
        if own.startswith(OF_TOWER):
            yield from _written(own, values.to(torch.float32).numpy(), projector, config, names, blocks)


def _usual(name: str) -> str:
    """The vision encoder's tensor names in most families; converters normalize to these first."""
    own = name.removeprefix("model.").replace("vision_encoder.", "vision_tower.").replace("vision_projection.", "multi_modal_projector.")
    return own.replace("encoder.patch_embed.", "patch_embed.")


def _written(own: str, values: np.ndarray, projector: str, config: Mapping[str, object], names: gguf.TensorNameMap,
             blocks: int) -> Iterator[tuple[str, np.ndarray]]:
    if projector == "mlp":
        yield from _by_early_converter(own, values, blocks)
        return
    vision = config["vision_config"]
    if projector == "gemma3":
        own = own.replace("vision_tower.", "vision_tower.vision_model.").replace("projection_weight", "projection.weight")
        values = values + np.float32(1) if "soft_emb_norm" in own else values
    if projector == "idefics3":
        own = "model." + own
    if projector in ("pixtral", "lightonocr") and own.endswith(("q_proj.weight", "k_proj.weight")):
        values = interleaved(values, vision["num_attention_heads"])
    if projector == "internvl":
        part = own.split(".")[-2]
        if own.startswith("multi_modal_projector."):
            yield f"mm.model.mlp.{INTERNVL[part]}.{own.rpartition('.')[2]}", values
            return
        own = "model." + own + (".weight" if ".lambda_" in own or "position_embeddings" in own else "")
    if projector == "lfm2":
        own = own.replace("vision_model.", "").replace("vision_tower.", "vision_tower.vision_model.")
        if own.endswith("patch_embedding.weight"):
            side = vision["patch_size"]
            values = values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2)
    if projector == "llama4":
        if own.startswith("multi_modal_projector."):
            yield "mm.model.fc.weight", values
            return
        own += ".weight" * own.endswith("positional_embedding_vlm")
    if projector == "kimik25":
        own = own.replace("proj.0.", "proj.linear_1.").replace("proj.2.", "proj.linear_2.")
        values = columns_first(values, vision["num_attention_heads"]) if ".wqkv." in own else values
    if projector == "kimivl":
        values = values.reshape(-1, values.shape[-1]) if ".pos_emb." in own else values
    if ".wqkv." in own and projector == "kimivl":
        for letter, rows in zip("qkv", np.split(values, 3), strict=True):
            yield names.get_name(own.replace("wqkv", f"w{letter}"), (".weight", ".bias")), rows
        return
    if projector == "minicpmv4_6":
        stem, _, kind = own.rpartition(".")
        for before, names_of, begin in (("vision_tower.vit_merger.", IN_MINICPM, "v.vit_merger."), ("merger.mlp.0.", BEHIND_MINICPM, "")):
            if own.startswith(before):
                yield f"{begin}{names_of[stem.removeprefix(before)]}.{kind}", values
                return
        own = own.replace("vision_tower.", "vision_tower.vision_model.")
    if projector == "hunyuanvl" and "position_embedding" in own:
        values = values[1:]
    if projector == "paddleocr":
        own = own.replace("visual.", "model.")
    if ".qkv." in own and projector in ("qwen2vl_merger", "qwen2.5vl_merger"):
        for letter, rows in zip("qkv", np.split(values, 3), strict=True):
            yield names.get_name(own.replace("qkv", letter), (".weight", ".bias")), rows
        return
    if own == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
        return
    if ".deepstack_merger_list." in own:
        _, _, index, part, kind = own.split(".")
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(index)]}.{part.removeprefix('linear_')}.{kind}", values
        return
    if own.startswith("visual.merger.") and projector == "qwen3vl_merger":
        _, _, part, kind = own.split(".")
        yield f"{ {'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2', 'norm': 'v.post_ln'}[part]}.{kind}", values
        return
    name = names.get_name(own, (".weight", ".bias"))
    assert name is not None, own
    yield name, values


def columns_first(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys, of which pairs turn by column and by line in turns, with those that turn by column first in each head."""
    queries, keys, values_rest = np.split(values, 3)
    return np.concatenate([*(side.reshape(heads, -1, 2, 2, *side.shape[1:]).swapaxes(1, 2).reshape(side.shape) for side in (queries, keys)),
                           values_rest])


def _by_early_converter(own: str, values: np.ndarray, blocks: int) -> Iterator[tuple[str, np.ndarray]]:
    """The one for LLaVA, which calls the FFN's first matrix its second, and leaves layers out that nobody reads."""
    if own == "image_newline":
        yield "model.image_newline", values
    elif own.startswith("multi_modal_projector."):
        _, part, kind = own.split(".")
        yield f"mm.{LLAVA[part]}.{kind}", values
    elif "post_layernorm" not in own and (".layers." not in own or int(own.split(".")[3]) < blocks):
        for theirs, ours in EARLY.items():
            own = own.replace(theirs, ours)
        if not own.startswith("v.post_ln"):
            yield own, values
