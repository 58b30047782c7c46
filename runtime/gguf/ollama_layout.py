"""GGUF files by Ollama's own converter: vision encoder and text model in one file, and some keys renamed.

Such a file is presented as the two headers of llama.cpp's pair of files, text part and mmproj; tensors are read in place. For
architectures not in OLLAMA_VISION the encoder's tensors are skipped, with a notice.

    <arch>.vision.<key>, v.*, mm.*        beside <arch>.<key> and blk.*
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...offload.gguf_header import GgufHeader, GgufTensor, Value
from .projector_names import CLIP, SECOND_FRAME_EMBD

ENCODER_PREFIXES = ("v.", "mm.", "a.")  # of encoder tensors
ENCODER_SECTIONS = ("vision.", "mm.", "audio.")  # of encoder keys, after the architecture's name
LAYER_TENSOR = re.compile(r"v\.blk\.([0-9]{1,4})\.(.+)\.(weight|bias)")
ROWS_IN_ORDER = f"{CLIP}.rows_in_order"  # key added here: q and k have the checkpoint's row order
IMAGE_HALF = [0.5, 0.5, 0.5]
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True)
class OllamaVision:
    """How Ollama's files of an architecture translate to llama.cpp's mmproj file. Tensor names are without their kind unless noted."""

    text_architecture: str  # of llama.cpp's text model file
    projector_type: str  # of llama.cpp's mmproj file
    layer_names: Mapping[str, str]  # part of a layer -> llama.cpp's
    outer_names: Mapping[str, str]  # tensor outside the layers -> llama.cpp's
    default_keys: Mapping[str, Value]  # keys below `clip.` that the file leaves out
    derived_keys: Callable[[GgufHeader], Mapping[str, Value]] = lambda header: {}  # keys below `clip.` computed from the file's
    full_names: Mapping[str, str] = field(default_factory=dict)  # tensor with kind -> llama.cpp's


def _gemma3(header: GgufHeader) -> dict[str, Value]:
    """The pooling factor: patches per side of a token."""
    data = header.metadata
    side, patch, rows = (data.get(f"gemma3.{key}", default) for key, default in (
        ("vision.image_size", 896), ("vision.patch_size", 14), ("mm.tokens_per_image", 256)))
    if not all(type(each) is int and each > 0 for each in (side, patch, rows)):
        return {}
    return {"vision.projector.scale_factor": max(1, side // patch // max(1, int(rows**0.5)))}


def _pixtral(header: GgufHeader) -> dict[str, Value]:
    data = header.metadata
    return {"vision.spatial_merge_size": data.get("mistral3.spatial_merge_size", 2),
            "rope.freq_base": data.get("mistral3.vision.rope.freq_base", 10_000.0)}


def _qwen(header: GgufHeader) -> dict[str, Value]:
    """The period of layers with full attention, and the FFN width, which only its tensor states."""
    keys: dict[str, Value] = {}
    full_attention_layers = header.metadata.get("qwen25vl.vision.fullatt_block_indexes")
    if full_attention_layers is not None and len(full_attention_layers):
        keys["vision.n_wa_pattern"] = int(full_attention_layers[0]) + 1
    ffn_up = header.tensors.get("v.blk.0.ffn_up.weight") or header.tensors.get("v.blk.0.mlp.up_proj.weight")
    if ffn_up is not None:
        keys["vision.feed_forward_length"] = ffn_up.shape[0]
    return keys


_FFN = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
OLLAMA_VISION: Mapping[str, OllamaVision] = {
    "gemma3": OllamaVision(
        "gemma3", "gemma3", {"layer_norm1": "ln1", "layer_norm2": "ln2", "attn_output": "attn_out", "mlp.fc1": "ffn_up",
                             "mlp.fc2": "ffn_down"},
        {"v.patch_embedding": "v.patch_embd", "v.position_embedding": "v.position_embd", "v.post_layernorm": "v.post_ln",
         "mm.mm_soft_emb_norm": "mm.soft_emb_norm", "mm.mm_input_projection": "mm.input_projection"},
        {"vision.image_mean": IMAGE_HALF, "vision.image_std": IMAGE_HALF, "use_gelu": True, "vision.attention.layer_norm_epsilon": 1e-6},
        _gemma3),
    "mistral3": OllamaVision(
        "llama", "pixtral", {"attn_norm": "ln1", "ffn_norm": "ln2", "attn_output": "attn_out"},
        {"v.patch_conv": "v.patch_embd", "v.encoder_norm": "v.pre_ln", "mm.norm": "mm.input_norm",
         "mm.patch_merger.merging_layer": "mm.patch_merger", "mm.linear_1": "mm.1", "mm.linear_2": "mm.2"},
        {"vision.image_mean": CLIP_MEAN, "vision.image_std": CLIP_STD, "use_silu": True, "vision.attention.layer_norm_epsilon": 1e-5,
         "rows_in_order": True}, _pixtral),
    "qwen25vl": OllamaVision(
        "qwen2vl", "qwen2.5vl_merger", _FFN,
        {"v.merger.ln_q": "v.post_ln", "v.merger.mlp.0": "mm.0", "v.merger.mlp.2": "mm.2"},
        {"vision.image_mean": CLIP_MEAN, "vision.image_std": CLIP_STD, "use_silu": True, "vision.image_size": 560}, _qwen,
        {"v.patch_embd_0.weight": SECOND_FRAME_EMBD.removesuffix(".1"), "v.patch_embd_1.weight": SECOND_FRAME_EMBD}),
}
# Architecture -> key of Ollama's converter -> llama.cpp's.
RENAMED_KEYS = {"gemma3": {"rope.local.freq_base": "rope.freq_base_swa", "rope.global.freq_base": "rope.freq_base"},
                "qwen25vl": {"rope.mrope_section": "rope.dimension_sections"}}
# Keys that Ollama's multimodal Gemma 3 files leave out.
GEMMA3_DEFAULTS = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1_000_000.0, "rope.freq_base_swa": 10_000.0}
# Numbers of layers of the sizes with scaled RoPE, which the files omit, and of the size whose files state Gemma 2's logit softcapping.
GEMMA3_SCALED_ROPE, GEMMA3_1B_LAYERS, GEMMA2_SOFTCAP = (34, 48, 62), 26, 30.0


def text_part(header: GgufHeader) -> GgufHeader:
    """Header of the text part as llama.cpp would write it; the header itself where Ollama's converter did not write the file."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name == CLIP:
        return header
    towers = _encoder_tensors(header, name)
    if not towers and not any(f"{name}.{key}" in header.metadata for key in RENAMED_KEYS.get(name, ())):
        return header
    architecture = OLLAMA_VISION[name].text_architecture if towers and name in OLLAMA_VISION else name
    data: dict[str, Value] = {}
    for key, value in header.metadata.items():
        suffix = key.removeprefix(f"{name}.") if key.startswith(f"{name}.") else None
        if suffix is None:
            data[key] = value
        elif not (towers and suffix.startswith(ENCODER_SECTIONS)):
            data[f"{architecture}.{RENAMED_KEYS.get(name, {}).get(suffix, suffix)}"] = value
    data["general.architecture"] = architecture
    _add_defaults(name, data)
    has_vision = bool(towers) and name in OLLAMA_VISION
    return replace(header, metadata=data, tensors={key: each for key, each in header.tensors.items() if key not in towers},
                   left_out=() if has_vision else tuple(sorted(towers)), sees=has_vision)


def _encoder_tensors(header: GgufHeader, name: str) -> frozenset[str]:
    """Names of the encoders' tensors in a model file; empty unless the file states an encoder's number of layers."""
    if not any(f"{name}.{section}block_count" in header.metadata for section in ("vision.", "audio.")):
        return frozenset()
    return frozenset(each for each in header.tensors if each.startswith(ENCODER_PREFIXES))


def _add_defaults(name: str, data: dict[str, Value]) -> None:
    """Add what Ollama's files leave implicit, and remove what they state wrongly."""
    if name == "gemma3":
        for key, value in GEMMA3_DEFAULTS.items():
            data.setdefault(f"gemma3.{key}", value)
        layers = data.get("gemma3.block_count")
        if layers in GEMMA3_SCALED_ROPE and "gemma3.rope.scaling.type" not in data:
            data |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
        if layers == GEMMA3_1B_LAYERS and data.get("gemma3.final_logit_softcapping") == GEMMA2_SOFTCAP:
            del data["gemma3.final_logit_softcapping"]
        data.setdefault("tokenizer.ggml.add_space_prefix", False)
    if name == "mistral3":
        if data.get("tokenizer.ggml.model") == "gpt2" and data.get("tokenizer.ggml.pre", "default") == "default":
            data["tokenizer.ggml.pre"] = "tekken"
        for key in ("image_token_index", "spatial_merge_size"):
            data.pop(f"llama.{key}", None)


def vision_part(header: GgufHeader) -> GgufHeader | None:
    """Header of the vision part as llama.cpp would write it; None where there is none, or an unknown one."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in OLLAMA_VISION or not _encoder_tensors(header, name):
        return None
    layout, prefix = OLLAMA_VISION[name], f"{name}.vision."
    vision_keys = {f"vision.{key.removeprefix(prefix)}": value for key, value in header.metadata.items() if key.startswith(prefix)}
    keys = {**layout.default_keys, **layout.derived_keys(header), **vision_keys, "projector_type": layout.projector_type}
    data = {f"{CLIP}.{key}": value for key, value in keys.items()}
    data["general.architecture"] = CLIP
    tensors: dict[str, GgufTensor] = {}
    for each in _encoder_tensors(header, name):
        tensors[_llama_cpp_name(each, layout)] = header.tensors[each]
    return replace(header, metadata=data, tensors=dict(sorted(tensors.items())))


def _llama_cpp_name(name: str, layout: OllamaVision) -> str:
    if name in layout.full_names:
        return layout.full_names[name]
    if (match := LAYER_TENSOR.fullmatch(name)) is not None:
        return f"v.blk.{int(match[1])}.{layout.layer_names.get(match[2], match[2])}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{layout.outer_names.get(stem, stem)}.{kind}"
