"""Vision keys of mmproj files per projector type, translated to config.json and preprocessor_config.json. `projector_config.py` reads
the file; tensor names are in `projector_names.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt

from ...offload.gguf_header import GgufHeader
from ...offload.safetensors_header import damaged, shown
from ..config_reader import Keys
from ..images.modality import AUDIO_INPUT, IMAGE_INPUT
from .projector_config import HAS_ENCODER_KEY, MODALITY_NAMES, VISION_PREFIX, Values, projector_types, require_tensor
from .projector_names import CLASS_EMBD, CLIP, DEEPSTACK_TENSOR, IMAGE_NEWLINE, POST_LN, SECOND_FRAME_EMBD

BICUBIC, BILINEAR, LANCZOS = 3, 2, 1
QWEN_KEYS = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
IDEFICS3_MAX_TILES = 4  # per side of an image, if the file does not state the image size
# Minimum and maximum pixels of an image by projector type.
QWEN_PIXELS = {**dict.fromkeys(("exaone4_5", "qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o"), (56 * 56, 12_845_056)),
               "qwen3vl_merger": (65_536, 16_777_216)}
GLM_PIXELS, KIMI_MAX_PATCHES = (112 * 112, 9_633_792), 16_384  # pixels of a video of two frames (minimum, maximum); patches of an image

JsonPair = tuple[Mapping[str, object], Mapping[str, object]]  # config.json and preprocessor_config.json
TowerConfig = Mapping[str, object]  # sizes of the encoder, by their config.json keys


def _square_size(tower: TowerConfig) -> dict[str, object]:
    return {"height": tower["image_size"], "width": tower["image_size"]}


def _activation(keys: Values, gelu: str) -> str:
    return "silu" if keys["use_silu"] else gelu if keys["use_gelu"] else "quick_gelu"


def _llava(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """LLaVA 1.5 and 1.6. The file holds only layers up to the last one read; without `feature_layer` the last one is projected."""
    clip, tiles = CLASS_EMBD in header.tensors, any(name in header.tensors for name in IMAGE_NEWLINE)
    config = {
        "model_type": "llava_next" if tiles else "llava", "vision_feature_layer": keys.get("feature_layer") or tower["num_hidden_layers"],
        "vision_feature_select_strategy": "default" if clip else "full",
        "vision_config": {"model_type": "clip_vision_model" if clip else "siglip_vision_model", **tower,
                          "hidden_act": _activation(keys, "gelu" if clip else "gelu_pytorch_tanh")}}
    resize = {"size": {"shortest_edge": tower["image_size"]}, "crop_size": _square_size(tower), "resample": BICUBIC}
    if not tiles:
        return config, {"image_processor_type": "LlavaImageProcessor", "do_pad": True, **resize}
    pinpoints = keys.get("image_grid_pinpoints")
    if pinpoints is not None and (not isinstance(pinpoints, list) or len(pinpoints) % 2):
        damaged(header.path, f"states {VISION_PREFIX}image_grid_pinpoints that are not widths and heights")
    pairs = [[height, width] for width, height in zip(pinpoints[::2], pinpoints[1::2], strict=True)] if pinpoints else None
    return config, {"image_processor_type": "LlavaNextImageProcessor", **resize, **({"image_grid_pinpoints": pairs} if pairs else {})}


def _idefics3(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    side = tower["image_size"]
    longest = keys.get("preproc_image_size") or (IDEFICS3_MAX_TILES * side if type(side) is int else side)
    return ({"model_type": "idefics3", "scale_factor": keys.get("projector.scale_factor"),
             "vision_config": {"model_type": "idefics3_vision", **tower, "hidden_act": _activation(keys, "gelu_pytorch_tanh")}},
            {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side},
             "resample": LANCZOS})


def _pixtral(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    merge = keys.get("spatial_merge_size")
    return ({"model_type": "llava" if merge is None else "mistral3", "spatial_merge_size": merge, "vision_feature_layer": -1,
             "vision_config": {"model_type": "pixtral", **tower, "rope_theta": header.metadata.get(f"{CLIP}.rope.freq_base"),
                               "hidden_act": _activation(keys, "gelu")}},
            {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": tower["image_size"]}, "resample": BICUBIC})


def _lighton(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """Images are resized to whole patches, as in all of its checkpoints."""
    config, processor = _pixtral(header, keys, tower, text)
    return {**config, "model_type": "lighton_ocr"}, {**processor, "patch_size": {side: tower["patch_size"] for side in ("height", "width")}}


def _internvl(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    merge = keys.get("projector.scale_factor", 2)
    return ({"model_type": "internvl", "downsample_ratio": 1 / merge if type(merge) is int and merge > 0 else merge,
             "vision_feature_layer": -1,
             "vision_config": {"model_type": "internvl_vision", **tower, "hidden_act": _activation(keys, "gelu"),
                               "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in header.tensors else "rms_norm",
                               "use_qk_norm": "v.blk.0.attn_q_norm.weight" in header.tensors,
                               "use_mean_pooling": f"{POST_LN}.weight" not in header.tensors}},
            {"image_processor_type": "GotOcr2ImageProcessor", "size": _square_size(tower), "min_patches": keys.get("preproc_min_tiles"),
             "max_patches": keys.get("preproc_max_tiles"), "resample": BICUBIC})


def _gemma3(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    reader = Keys({"projector.scale_factor": 4, **keys}, f"{header.path}: {CLIP}.vision")
    side, patch = reader.integer("image_size", high=1 << 14), reader.integer("patch_size", high=1 << 10)
    patches_per_side = side // patch // reader.integer("projector.scale_factor", high=1 << 10)
    return ({"model_type": "gemma3", "mm_tokens_per_image": patches_per_side**2,
             "vision_config": {"model_type": "siglip_vision_model", **tower, "hidden_act": _activation(keys, "gelu_pytorch_tanh")}},
            {"image_processor_type": "Gemma3ImageProcessor", "size": _square_size(tower), "resample": BILINEAR})


def _qwen(kind: str, add_keys: Callable[[GgufHeader, Values, dict[str, object]], None]) -> Callable[..., JsonPair]:
    def build(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
        vision = {QWEN_KEYS.get(name, name): value for name, value in tower.items()}
        vision |= {"spatial_merge_size": keys.get("spatial_merge_size"), "temporal_patch_size": 1 + (SECOND_FRAME_EMBD in header.tensors)}
        add_keys(header, keys, vision)
        names = ("image_min_pixels", "image_max_pixels")
        min_pixels, max_pixels = (keys.get(name, default) for name, default in zip(names, QWEN_PIXELS[kind], strict=True))
        model, tower_type = FIXED_MODEL_TYPES.get(kind) or (MODEL_TYPES[text], vision["model_type"])
        has_audio = header.metadata.get(HAS_ENCODER_KEY.format(MODALITY_NAMES[AUDIO_INPUT]))
        if (model, has_audio) == ("qwen3_vl_moe", True):  # the only one of these with audio
            model = "qwen3_omni_moe"
        return ({"model_type": model, "vision_config": {**vision, "model_type": tower_type}},
                {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": min_pixels, "max_pixels": max_pixels, "resample": BICUBIC})

    return build


# Architecture of the text model -> model type with M-RoPE.
MODEL_TYPES = {"qwen2vl": "qwen2_5_vl", "qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5",
               "qwen35moe": "qwen3_5_moe"}


# Projector type -> (model type, model type of its vision_config), for any text model.
FIXED_MODEL_TYPES = {"exaone4_5": ("exaone4_5", "exaone4_5_vision"), "qwen2.5o": ("qwen2_5_omni", "qwen2_5_omni_vision_encoder"),
                     "qwen2vl_merger": ("qwen2_vl", "qwen2_vl_vision")}


def _add_qwen2(header: GgufHeader, keys: Values, vision: dict[str, object]) -> None:
    """Qwen2-VL calls the encoder's width `embed_dim`; its `hidden_size` is the text model's."""
    reader = Keys(keys, f"{header.path}: {CLIP}.vision")
    width, ffn_width = reader.integer("embedding_length", high=1 << 16), reader.integer("feed_forward_length", high=1 << 20)
    if ffn_width % width:
        damaged(header.path, f"has {ffn_width} inner numbers for a width of {width}, which are no whole multiple")
    vision |= {"model_type": "qwen2_vl", "embed_dim": width, "mlp_ratio": ffn_width // width, "hidden_act": _activation(keys, "gelu")}


def _add_qwen2_5(header: GgufHeader, keys: Values, vision: dict[str, object]) -> None:
    """Full attention in every n-th layer. `tokens_per_second` is the same in all checkpoints."""
    reader = Keys(keys, f"{header.path}: {CLIP}.vision")
    period, depth = reader.integer("n_wa_pattern", high=1 << 10), reader.integer("block_count", high=1 << 10)
    vision |= {"model_type": "qwen2_5_vl", "hidden_act": _activation(keys, "gelu_pytorch_tanh"), "window_size": keys.get("window_size"),
               "tokens_per_second": 2,
               "fullatt_block_indexes": list(range(period - 1, depth, period))}


def _add_exaone(header: GgufHeader, keys: Values, vision: dict[str, object]) -> None:
    _add_qwen2_5(header, keys, vision)
    vision |= {"num_key_value_heads": keys.get("attention.head_count_kv")}


def _add_qwen3(header: GgufHeader, keys: Values, vision: dict[str, object]) -> None:
    deepstack_layers = sorted({int(match[1]) for name in header.tensors if (match := DEEPSTACK_TENSOR.fullmatch(name))})
    num_positions = require_tensor(header, "v.position_embd.weight").shape[0]
    if isqrt(num_positions) ** 2 != num_positions:
        damaged(header.path, f"has {num_positions} places for patches in v.position_embd.weight, which are not a square")
    vision |= {"model_type": "qwen3_vl" if deepstack_layers else "qwen3_5", "hidden_act": _activation(keys, "gelu_pytorch_tanh"),
               "num_position_embeddings": num_positions, "deepstack_visual_indexes": deepstack_layers}


def _lfm2(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The file holds only layers up to the last one read."""
    vision = {"model_type": "siglip2_vision_model", **tower, "num_patches": require_tensor(header, "v.position_embd.weight").shape[0],
              "hidden_act": _activation(keys, "gelu_pytorch_tanh")}
    factor = keys.get("projector.scale_factor", 2)
    return ({"model_type": "lfm2_vl", "downsample_factor": factor, "projector_hidden_size": require_tensor(header, "mm.1.weight").shape[0],
             "projector_bias": "mm.1.bias" in header.tensors, "projector_use_layernorm": "mm.input_norm.weight" in header.tensors,
             "vision_config": vision},
            {"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": tower["patch_size"], "downsample_factor": factor})


def _gemma4(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """Head size and number of positions are read off tensor shapes."""
    q_proj, heads = require_tensor(header, "v.blk.0.attn_q.weight"), tower["num_attention_heads"]
    position_shape = require_tensor(header, "v.position_embd.weight").shape
    vision = {"model_type": "gemma4_vision", **tower, "head_dim": q_proj.shape[0] // heads if type(heads) is int and heads > 0 else heads,
              "position_embedding_size": position_shape[1] if len(position_shape) > 1 else 0, "rms_norm_eps": tower["layer_norm_eps"],
              "use_clipped_linears": "v.blk.0.attn_q.input_max" in header.tensors, "standardize": "v.std_bias" in header.tensors}
    return {"model_type": "gemma4", "vision_config": vision}, {"image_processor_type": "Gemma4ImageProcessor", "image_mean": None,
                                                               "image_std": None, "patch_size": tower["patch_size"]}


def _gemma4_unified(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The pooling factor is read off the shape of the patch embedding."""
    reader = Keys({"attention.layer_norm_epsilon": 1e-6, **keys}, f"{header.path}: {CLIP}.vision")
    patch, shape = reader.integer("patch_size", high=1 << 10), require_tensor(header, "v.patch_embd.weight").shape
    pooling, position_shape = isqrt(shape[-1] // 3) // patch, require_tensor(header, "v.position_embd.weight").shape
    if len(shape) != 2 or shape[1] != 3 * (pooling * patch) ** 2:
        damaged(header.path, f"has tensor v.patch_embd.weight of shape {list(shape)}, not of square patches of {patch} pixels")
    vision = {"model_type": "gemma4_unified_vision", "patch_size": patch, "pooling_kernel_size": pooling, "mm_embed_dim": shape[0],
              "output_proj_dims": shape[0], "mm_posemb_size": position_shape[1] if len(position_shape) == 3 else 0,
              "rms_norm_eps": reader.number("attention.layer_norm_epsilon")}
    return {"model_type": "gemma4_unified", "vision_config": vision}, {
        "image_processor_type": "Gemma4UnifiedImageProcessor", "image_mean": None, "image_std": None, "patch_size": patch,
        "pooling_kernel_size": pooling}


def _glm(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """GLM-OCR has no position embeddings. For the others the file's FFN width is that of the merger; layers have the text model's width."""
    is_ocr, pixel_limits = "v.position_embd.weight" not in header.tensors, dict(zip(("min_pixels", "max_pixels"), GLM_PIXELS, strict=True))
    model = "glm_ocr" if is_ocr else "glm4v_moe" if text == "glm4moe" else "glm4v"
    vision = {QWEN_KEYS.get(name, name): value for name, value in tower.items()}
    vision |= {"model_type": "glm_ocr_vision" if is_ocr else f"{model}_vision", "rms_norm_eps": tower["layer_norm_eps"],
               "hidden_act": _activation(keys, "gelu"), "out_hidden_size": require_tensor(header, "mm.down.weight").shape[0],
               "attention_bias": "v.blk.0.attn_qkv.bias" in header.tensors, "spatial_merge_size": keys.get("spatial_merge_size", 2),
               "temporal_patch_size": 1 + (SECOND_FRAME_EMBD in header.tensors)}
    return {"model_type": model, "vision_config": vision}, {"image_processor_type": "Glm4vImageProcessor", **pixel_limits,
                                                            "resample": BICUBIC}


def _glm5(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The file also states the image size limits in pixels, and the clamp of the FFN's gates."""
    config, _ = _glm(header, keys, tower, text)
    reader, vision = Keys(keys, f"{header.path}: {CLIP}.vision"), config["vision_config"]
    pixels_per_token = (reader.integer("patch_size", high=1 << 10) * reader.integer("spatial_merge_size", 2, high=16)) ** 2
    tokens = {f"{bound}_image_tokens": reader.integer(f"image_{bound}_pixels", high=1 << 40) // pixels_per_token
              for bound in ("min", "max")}
    vision = {**vision, "model_type": "glm5_next_vision", "projection_intermediate_size": require_tensor(header, "mm.up.weight").shape[0],
              "swiglu_limit": reader.number("swiglu_clamp")}
    return {"model_type": "glm5_next", "vision_config": vision}, {"image_processor_type": "Glm5NextImageProcessor", **tokens,
                                                                  "resample": BICUBIC}


def _llama4(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    merge, first, second = keys.get("projector.scale_factor", 2), *(require_tensor(header, f"mm.model.mlp.{number}.weight").shape[0]
                                                                    for number in (1, 2))
    vision = {"model_type": "llama4_vision_model", **tower, "projector_input_dim": first, "projector_output_dim": second,
              "vision_output_dim": second, "pixel_shuffle_ratio": 1 / merge if type(merge) is int and merge > 0 else merge}
    return {"model_type": "llama4", "vision_config": vision}, {"image_processor_type": "Llama4ImageProcessor", "size": _square_size(tower)}


def _kimi(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """Files of Kimi K2.5 state the maximum pixels of an image; those of Kimi-VL often do not, and flatten the position table."""
    reader, position_shape = Keys(keys, f"{header.path}: {CLIP}.vision"), require_tensor(header, "v.position_embd.weight").shape
    merge, patch = reader.integer("projector.scale_factor", 2, high=16), reader.integer("patch_size", high=1 << 10)
    vision = {**tower, "hidden_act": "gelu_pytorch_tanh", "merge_kernel_size": [merge] * 2}
    outer_config = {"projection_layer_norm_eps": tower["layer_norm_eps"]}
    if projector_types(header)[IMAGE_INPUT] == "kimivl":
        position_shape = (isqrt(position_shape[0]),) * 2
        processor = {"image_processor_type": "KimiVLImageProcessor", "pad_input": True, "merge_size": merge, "patch_size": patch}
        if "image_max_pixels" in keys:
            processor["max_patches"] = reader.integer("image_max_pixels", high=1 << 40) // patch**2
        return {"model_type": "kimi_vl", **outer_config,
                "vision_config": {**vision, **_position_table(position_shape), "model_type": "moonvit"}}, processor
    if len(position_shape) != 3:
        damaged(header.path, f"has tensor v.position_embd.weight of shape {list(position_shape)}, not of lines, columns and numbers")
    max_patches = reader.integer("image_max_pixels", KIMI_MAX_PATCHES * patch**2, high=1 << 40) // patch**2
    return {"model_type": "kimi_k25", **outer_config,
            "vision_config": {**vision, **_position_table(position_shape), "model_type": "kimi_k25_vision"}}, {
        "image_processor_type": "Kimi_K25ImageProcessor", "max_patches": max_patches, "merge_size": merge, "patch_size": patch}


def _position_table(shape: tuple[int, ...]) -> dict[str, int]:
    return {"pos_emb_height": shape[0], "pos_emb_width": shape[1]}


def _minicpm(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The file's image size is that of slices; the number of positions is read off their tensor."""
    reader, num_positions = Keys(keys, f"{header.path}: {CLIP}.vision"), require_tensor(header, "v.position_embd.weight").shape[0]
    patch, layers, merge = reader.integer("patch_size", high=1 << 10), keys.get("wa_layer_indexes"), keys.get("projector.scale_factor", 4)
    if merge not in (2, 4):
        damaged(header.path, f"states {VISION_PREFIX}projector.scale_factor {shown(merge)}, expected 2 or 4")
    mode = "4x" if merge == 2 else "16x"
    vision = {"model_type": "minicpmv4_6_vision", **tower, "image_size": isqrt(num_positions) * patch,
              "hidden_act": _activation(keys, "gelu_pytorch_tanh")}
    return ({"model_type": "minicpmv4_6", "downsample_mode": mode, "vision_config": vision,
             **({"insert_layer_id": layers[0]} if isinstance(layers, list) and layers else {})},
            {"image_processor_type": "MiniCPMV4_6ImageProcessor", "scale_resolution": tower["image_size"], "patch_size": patch,
             "downsample_mode": mode, "resample": BICUBIC})


def _gemma3n(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The vocabulary ends with the vision tokens, followed by the audio tokens."""
    reader, vision_vocab = Keys(keys, f"{header.path}: {CLIP}.vision"), require_tensor(header, "mm.embedding.weight").shape[0]
    audio_vocab = header.tensors["mm.a.embedding.weight"].shape[0] if "mm.a.embedding.weight" in header.tensors else vision_vocab
    tokens_per_image = reader.integer("image_size", high=1 << 14) // reader.integer("patch_size", high=1 << 14)
    vision = {"model_type": "gemma3n_vision", "hidden_size": tower["hidden_size"], "rms_norm_eps": tower["layer_norm_eps"],
              "vocab_size": vision_vocab, "words_from_end": vision_vocab + audio_vocab}
    return {"model_type": "gemma3n", "vision_soft_tokens_per_image": tokens_per_image, "vision_config": vision}, {
        "image_processor_type": "SiglipImageProcessor", "size": _square_size(tower), "resample": BILINEAR}


def _paddle(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The file's image size is that of the largest image; the number of positions is read off their tensor."""
    patch, num_positions = tower["patch_size"], require_tensor(header, "v.position_embd.weight").shape[0]
    pixel_limits = {f"{bound}_pixels": keys.get(f"image_{bound}_pixels") for bound in ("min", "max")}
    vision = {"model_type": "paddleocr_vl_vision", **tower, "image_size": isqrt(num_positions) * patch if type(patch) is int else patch,
              "hidden_act": _activation(keys, "gelu_pytorch_tanh")}
    return {"model_type": "paddleocr_vl", "vision_config": vision}, {"image_processor_type": "PaddleOCRVLImageProcessor", **pixel_limits,
                                                                     "resample": BICUBIC}


def _hunyuan(header: GgufHeader, keys: Values, tower: TowerConfig, text: str) -> JsonPair:
    """The file holds only the position embeddings of patches."""
    patch, num_positions = tower["patch_size"], require_tensor(header, "v.position_embd.weight").shape[0]
    pixel_limits = {f"{bound}_pixels": keys.get(f"image_{bound}_pixels") for bound in ("min", "max")}
    vision = {"model_type": "hunyuan_vl_vision", **tower, "max_image_size": isqrt(num_positions) * patch if type(patch) is int else patch,
              "rms_norm_eps": tower["layer_norm_eps"], "hidden_act": _activation(keys, "gelu"), "places_before": 0,
              "spatial_merge_size": keys.get("spatial_merge_size", 2)}
    return {"model_type": "hunyuan_vl", "vision_config": vision}, {"image_processor_type": "HunYuanVLImageProcessor", **pixel_limits}


# Projector type -> builder of the JSON files.
BUILDERS: Mapping[str, Callable[..., JsonPair]] = {
    "exaone4_5": _qwen("exaone4_5", _add_exaone), "gemma3": _gemma3, "gemma3nv": _gemma3n, "gemma4uv": _gemma4_unified, "gemma4v": _gemma4,
    "glm4v": _glm, "glm5v": _glm5, "hunyuanocr": _hunyuan, "hunyuanvl": _hunyuan, "idefics3": _idefics3, "internvl": _internvl,
    "kimik25": _kimi, "kimivl": _kimi, "lfm2": _lfm2, "lightonocr": _lighton, "llama4": _llama4, "minicpmv4_6": _minicpm, "mlp": _llava,
    "paddleocr": _paddle, "pixtral": _pixtral, "qwen2.5o": _qwen("qwen2.5o", _add_qwen2_5),
    "qwen2.5vl_merger": _qwen("qwen2.5vl_merger", _add_qwen2_5), "qwen2vl_merger": _qwen("qwen2vl_merger", _add_qwen2),
    "qwen3vl_merger": _qwen("qwen3vl_merger", _add_qwen3)}
