"""Exports a vision or audio encoder as a GGUF file of its own (mmproj), as llama.cpp's converter writes it: the inverse of
`projector_config.py` and `projector_store.py`. Audio-only parts are in `audio_export.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import isqrt, prod
from pathlib import Path

import numpy as np

from ... import DoesNotFit, EffllmError, UsageError
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.gguf_header import Value
from ...offload.gguf_writer import NewFile, gguf_head, padded
from ...offload.safetensors_header import AGAIN, TensorInfo, is_gguf
from ...offload.size import format_size
from ..audio.audio_tower import AudioTower
from ..config import ModelConfig, read_config
from ..events import Progress
from ..images import encoders_of, model_type_of
from ..images.glm4v import Glm4v
from ..images.glm5_next import Glm5Next
from ..images.hunyuan_vl import HunyuanVl
from ..images.kimi_k25 import KimiK25
from ..images.kimi_vl import KimiVl
from ..images.llama4 import EPS as LLAMA4_EPS
from ..images.llama4 import Llama4
from ..images.llava import Llava
from ..images.llava_next import LlavaNext
from ..images.minicpmv4_6 import MiniCpmV
from ..images.modality import AUDIO_INPUT, IMAGE_INPUT, Modality
from ..images.tower_weights import canonical_name, is_of_tower, tower_store
from ..images.vision_tower import VisionTower
from ..images.vision_transformer import layer_count, wanted_layers
from . import audio_export, gemma4_export
from .export import Exported, check_output_name, check_target
from .projector_names import CLIP, DEEPSTACK_PARTS, PROJECTORS, SECOND_FRAME_EMBD, TENSOR_KINDS, Projector
from .projector_store import CHANNELS, gguf_row_order
from .projector_tensors import ProjectorTensor, projector_tensor

# Model type -> projector type.
PROJECTOR_TYPES: Mapping[str, str] = {
    "exaone4_5": "exaone4_5", "gemma3": "gemma3", "glm5_next": "glm5v", "hunyuan_vl": "hunyuanvl",
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr"), "glm4v"),
    **dict.fromkeys(("idefics3", "smolvlm"), "idefics3"), "internvl": "internvl", "kimi_k25": "kimik25", "kimi_vl": "kimivl",
    "lfm2_vl": "lfm2", "lighton_ocr": "lightonocr", "llama4": "llama4", "llava": "mlp", "llava_next": "mlp", "minicpmv4_6": "minicpmv4_6",
    "mistral3": "pixtral", "paddleocr_vl": "paddleocr", "qwen2_5_vl": "qwen2.5vl_merger", "qwen2_vl": "qwen2vl_merger",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), "qwen3vl_merger")}
TOWER_LAYER = re.compile(r"vision_tower\.encoder\.layers\.(\d+)\.(.+)")  # a layer's tensor in a LLaVA vision tower
SWAPPED_FFN = {"mlp.fc1": "mlp.fc2", "mlp.fc2": "mlp.fc1"}  # LLaVA's files swap the names of the FFN's matrices
IMG_BREAK, POSITION_EMBD = "v.token_embd.img_break", "v.position_embd.weight"
Keys = dict[str, Value]  # metadata, below `clip.vision.` unless noted


def exportable_projector(folder: Path) -> Modality | None:
    """The modality of the encoder that can be exported from a model folder; None if there is none."""
    kind = None if is_gguf(folder) else str(model_type_of(folder))
    if kind not in (*PROJECTOR_TYPES, *audio_export.PROJECTOR_TYPES, gemma4_export.NAME):
        return None
    with tower_store(folder) as store:
        if not any(is_of_tower(name, kind) for name in store.tensors):
            return None
    return AUDIO_INPUT if kind in audio_export.PROJECTOR_TYPES else IMAGE_INPUT


def require_encoders(folder: Path, config: ModelConfig) -> dict[Modality, VisionTower | AudioTower]:
    """The encoders to export, by modality. Raises UsageError for a model without one, or with one that mmproj files do not support."""
    encoders = encoders_of(folder, config)
    if not encoders:
        raise UsageError(f"{folder} takes neither images nor audio", "leave out --mmproj")
    known = (*PROJECTOR_TYPES, *audio_export.PROJECTOR_TYPES, gemma4_export.NAME)
    if (kind := str(model_type_of(folder))) not in known or kind == "llava" and not isinstance(encoders[IMAGE_INPUT], (Llava, EffllmError)):
        raise UsageError(f"of {kind} models no mmproj file is written", f"known: {', '.join(known)}")
    for encoder in encoders.values():
        if isinstance(encoder, EffllmError):
            raise encoder
    return encoders


def metadata(encoder: VisionTower, name: str, kind: str) -> Keys:
    """Metadata of the mmproj file of a model of this type."""
    projector, keys = PROJECTOR_TYPES[kind], encoder.tower_config
    activation = str(keys.raw.get("hidden_act"))
    eps = {"pixtral": 1e-5, "lightonocr": 1e-5}.get(projector, 1e-6)
    tower_keys: Keys = {
        "image_size": _image_size(encoder, projector), "patch_size": encoder.patch, "embedding_length": encoder.width,
        "feed_forward_length": keys.integer("mlp_ratio") * encoder.width if projector == "qwen2vl_merger" else keys.integer(
            "intermediate_size"),
        "block_count": keys.integer("depth") if projector.startswith(("exaone", "glm", "qwen")) else layer_count(encoder),
        "attention.head_count": encoder.heads, "projection_dim": encoder.config.hidden_size,
        "attention.layer_norm_epsilon": keys.number("layer_norm_eps", eps),
        "image_mean": np.array(encoder.scale.mean, np.float32), "image_std": np.array(encoder.scale.std, np.float32),
        **EXTRA_KEYS[projector](encoder)}
    activation_key = "use_silu" if activation == "silu" else "use_gelu"
    legacy_keys = {f"{CLIP}.has_llava_projector": True} if projector == "mlp" else {}
    return {"general.architecture": CLIP, "general.name": name, "general.type": "mmproj", "general.file_type": 1,
            f"{CLIP}.has_vision_encoder": True, f"{CLIP}.projector_type": projector, f"{CLIP}.{activation_key}": activation != "quick_gelu",
            **legacy_keys,
            **{f"{CLIP}.vision.{key}": value for key, value in tower_keys.items()}}


def _image_size(encoder: VisionTower, projector: str) -> int:
    """The image size that the file states: of the input, or of the square that the position embeddings span."""
    if projector == "lfm2":
        return LFM2_IMAGE_SIZE
    if projector.startswith(("exaone", "qwen")):
        return round(encoder.tower_config.integer("num_position_embeddings", 1600) ** 0.5) * encoder.patch
    if projector == "paddleocr":  # of the largest image
        return isqrt(int(encoder.most))
    if projector == "hunyuanvl":
        return encoder.tower_config.integer("max_image_size")
    return encoder.tower_config.integer("pos_emb_height") * encoder.patch if projector.startswith("kimi") else encoder.side


def _llava(encoder: Llava) -> Keys:
    """The file holds only layers up to the last one read; it states those layers, because a reader may default to an earlier one."""
    if encoder.drops_first != encoder.tower.startswith("clip"):
        raise UsageError("its vision tower uses an unusual feature strategy, which an mmproj file cannot state",
                         "leave out --mmproj")
    keys: Keys = {"block_count": max(encoder.wanted), "feature_layer": np.array(encoder.wanted, np.int32),
                  "projection_dim": encoder.tower_config.integer("projection_dim", 768)}
    if isinstance(encoder, LlavaNext):
        sides = [side for height, width in encoder.pinpoints for side in (width, height)]
        keys |= {"image_grid_pinpoints": np.array(sides, np.int32), "mm_patch_merge_type": "spatial_unpad"}
    return keys


def _idefics3(encoder: VisionTower) -> Keys:
    return {"projector.scale_factor": encoder.joined, "preproc_image_size": encoder.longest}


def _pixtral(encoder: VisionTower) -> Keys:
    if wanted_layers(encoder, -1) != [layer_count(encoder)]:
        raise UsageError("its vision tower is read from other layers than the last, which an mmproj file cannot state",
                         "leave out --mmproj")
    return {"spatial_merge_size": encoder.joined, "image_size": encoder.most[0]}


def _internvl(encoder: VisionTower) -> Keys:
    return {"projector.scale_factor": encoder.joined, "preproc_min_tiles": encoder.least, "preproc_max_tiles": encoder.most}


def _gemma3(encoder: VisionTower) -> Keys:
    across = encoder.side // encoder.patch
    return {"projector.scale_factor": across // round(encoder.root_config.integer("mm_tokens_per_image", 256) ** 0.5)}


def _qwen(encoder: VisionTower) -> Keys:
    return {"image_min_pixels": int(encoder.least), "image_max_pixels": int(encoder.most)}


def _glm(encoder: Glm4v) -> Keys:
    return {"attention.layer_norm_epsilon": encoder.tower_config.number("rms_norm_eps"), "spatial_merge_size": encoder.joined}


def _glm5(encoder: Glm5Next) -> Keys:
    return {**_glm(encoder), "swiglu_clamp": encoder.tower_config.number("swiglu_limit"), "image_min_pixels": int(encoder.least),
            "image_max_pixels":
            int(encoder.most)}


def _hunyuan(encoder: HunyuanVl) -> Keys:
    return {**_qwen(encoder), "attention.layer_norm_epsilon": encoder.tower_config.number("rms_norm_eps"),
            "spatial_merge_size": encoder.joined}


def _exaone(encoder: VisionTower) -> Keys:
    return {**_qwen2_5(encoder), "attention.head_count_kv": encoder.tower_config.integer("num_key_value_heads")}


def _lfm2(encoder: VisionTower) -> Keys:
    return {"projector.scale_factor": encoder.joined}


def _llama4(encoder: Llama4) -> Keys:
    return {"attention.layer_norm_epsilon": LLAMA4_EPS, "projector.scale_factor": encoder.joined}


def _kimi(encoder: KimiK25) -> Keys:
    return {"attention.layer_norm_epsilon": encoder.projector_eps, "projector.scale_factor": encoder.joined,
            "image_min_pixels": KIMI_MIN_PATCHES * encoder.patch**2, "image_max_pixels": encoder.most * encoder.patch**2}


def _kimi_vl(encoder: KimiVl) -> Keys:
    """The maximum pixels, which other writers leave out, are stated because models differ in them."""
    return {"attention.layer_norm_epsilon": encoder.projector_eps, "projector.scale_factor": encoder.joined,
            "image_max_pixels": encoder.most * encoder.patch**2}


def _minicpm(encoder: MiniCpmV) -> Keys:
    return {"image_size": encoder.resolution, "projector.scale_factor": 4 if encoder.merges else 2,
            "wa_layer_indexes": np.array([encoder.insert], np.int32)}


def _qwen2_5(encoder: VisionTower) -> Keys:
    """Full attention must be periodic, because the file states only the period."""
    depth = encoder.tower_config.integer("depth")
    full_attention_layers = sorted(encoder.tower_config.layers("fullatt_block_indexes", depth))
    if not full_attention_layers or full_attention_layers != list(range(full_attention_layers[0], depth, full_attention_layers[0] + 1)):
        raise UsageError(f"its vision tower has full attention in layers {full_attention_layers}, which an mmproj file cannot state",
                         "leave out --mmproj")
    return {**_qwen(encoder), "n_wa_pattern": full_attention_layers[0] + 1, "window_size": encoder.tower_config.integer("window_size")}


def _qwen3(encoder: VisionTower) -> Keys:
    depth = encoder.tower_config.integer("depth")
    deepstack_layers = encoder.tower_config.layers("deepstack_visual_indexes",
                                                   depth) if "deepstack_visual_indexes" in encoder.tower_config.raw else ()
    return {**_qwen(encoder), "spatial_merge_size": encoder.joined,
            "is_deepstack_layers": np.array([number in deepstack_layers for number in range(depth)], np.bool_)}


# Projector type -> function of its keys beyond those of every encoder.
EXTRA_KEYS: Mapping[str, Callable[[VisionTower], Keys]] = {
    "mlp": _llava, "idefics3": _idefics3, "pixtral": _pixtral, "lightonocr": _pixtral, "internvl": _internvl, "gemma3": _gemma3,
    "exaone4_5": _exaone, "glm4v": _glm, "glm5v": _glm5, "hunyuanvl": _hunyuan, "kimik25": _kimi, "kimivl": _kimi_vl, "lfm2": _lfm2,
    "llama4": _llama4, "minicpmv4_6": _minicpm, "paddleocr": _qwen, "qwen2vl_merger": _qwen, "qwen2.5vl_merger": _qwen2_5,
    "qwen3vl_merger": _qwen3}
SEPARATE_QKV = ("kimivl", "qwen2vl_merger", "qwen2.5vl_merger")  # projector types whose files hold q, k and v separately
PADDLE_UNUSED = ("visual.vision_model.head.", "visual.vision_model.embeddings.packing_position_embedding.")  # in checkpoints, never read
KIMI_MIN_PATCHES, LFM2_IMAGE_SIZE = 8, 256  # written for every Kimi K2.5 and LFM2-VL model


def file_tensors(encoder: VisionTower, store: TensorStore, kind: str) -> list[ProjectorTensor]:
    """The file's tensors in checkpoint order. Raises CheckpointError for one that no mmproj file has."""
    projector, tensors = PROJECTORS[PROJECTOR_TYPES[kind]], []
    for stored, info in store.tensors.items():
        if PROJECTOR_TYPES[kind] == "pixtral" and stored.endswith("embed_tokens.weight"):  # llama.cpp reads it here
            tensors.append(projector_tensor(IMG_BREAK, info, lambda values: values[encoder.token_id("[IMG_BREAK]")], (info.shape[1],)))
        if is_of_tower(stored) and not stored.endswith("position_ids"):
            tensors += _map_tensor(canonical_name(stored), info, projector, encoder)
    return tensors


def _map_tensor(checkpoint_name: str, info: TensorInfo, projector: Projector, encoder: VisionTower) -> Iterator[ProjectorTensor]:
    if checkpoint_name == "visual.patch_embed.proj.weight":
        for frame, name in enumerate((SECOND_FRAME_EMBD.removesuffix(".1"), SECOND_FRAME_EMBD)[: info.shape[2]]):
            yield projector_tensor(name, info, lambda values, frame=frame: values[:, :, frame], (*info.shape[:2], *info.shape[3:]))
        return
    if f".{projector.fused_name}." in checkpoint_name and any(projector is PROJECTORS[name] for name in SEPARATE_QKV):
        for part, own in enumerate(projector.fused_parts):
            name = _gguf_name(checkpoint_name.replace(f".{projector.fused_name}.", f".{own}."), projector, encoder)
            yield projector_tensor(name, info, lambda values, part=part: np.split(values, 3)[part], (info.shape[0] // 3, *info.shape[1:]))
        return
    if checkpoint_name.startswith(PADDLE_UNUSED):
        return
    if projector is PROJECTORS["mlp"]:
        match = TOWER_LAYER.fullmatch(checkpoint_name)
        if ".post_layernorm." in checkpoint_name or match and int(match[1]) >= max(encoder.wanted):  # not read
            return
        if match and (stem := match[2].rpartition(".")[0]) in SWAPPED_FFN:
            checkpoint_name = checkpoint_name.replace(stem, SWAPPED_FFN[stem])
    name = _gguf_name(checkpoint_name.replace("encoder.patch_embed.", "patch_embed."), projector, encoder)  # as in some Kimi checkpoints
    if name in projector.channels_last:
        shape = (info.shape[0], CHANNELS, encoder.patch, encoder.patch)
        yield projector_tensor(name, info, lambda values: np.moveaxis(values.reshape(shape[0], *shape[2:], CHANNELS), -1, 1), shape)
        return
    if name == POSITION_EMBD and isinstance(encoder, HunyuanVl):  # the first row is of no patch, and never read
        yield projector_tensor(name, info, lambda values: values[1:], (info.shape[0] - 1, info.shape[1]))
        return
    if name == POSITION_EMBD and isinstance(encoder, KimiVl):  # lines and columns in one row
        shape = (prod(info.shape[:-1]), info.shape[-1])
        yield projector_tensor(name, info, lambda values: values.reshape(shape), shape)
        return
    if (order := gguf_row_order(checkpoint_name, projector, info.shape[0], encoder.heads)) is not None:
        yield projector_tensor(name, info, lambda values: values[np.argsort(order)])
        return
    yield projector_tensor(name, info,
                           (lambda values: values + np.float32(1)) if name in projector.shifted_norms else (lambda values: values))


def _gguf_name(checkpoint_name: str, projector: Projector, encoder: VisionTower) -> str:
    stem, _, kind = checkpoint_name.rpartition(".")
    full_names = {here: in_file for in_file, here in projector.full_names.items()}
    outer_names = {here: in_file for in_file, here in projector.outer_names.items()}
    if checkpoint_name in full_names:
        return full_names[checkpoint_name]
    if stem in outer_names and kind in TENSOR_KINDS:
        return f"{outer_names[stem]}.{kind}"
    if match := re.fullmatch(rf"{re.escape(projector.layers_prefix)}(\d+)\.(.+)", checkpoint_name):
        layer_names, (stem, _, kind) = {here: in_file for in_file, here in projector.layer_names.items()}, match[2].rpartition(".")
        if match[2] in full_names:
            return f"v.blk.{match[1]}.{full_names[match[2]]}"
        if stem in layer_names and kind in TENSOR_KINDS:
            return f"v.blk.{match[1]}.{layer_names[stem]}.{kind}"
    if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(\w+)\.(\w+)", checkpoint_name):
        numbers = sorted(encoder.tower_config.layers("deepstack_visual_indexes", encoder.tower_config.integer("depth")))
        part = {here: in_file for in_file, here in DEEPSTACK_PARTS.items()}[match[2]]
        return f"v.deepstack.{numbers[int(match[1])]}.{part}.{match[3]}"
    raise CheckpointError(f"{encoder.source.model} holds tensor {checkpoint_name} of the vision tower, "
                          "which no mmproj file of its type has", AGAIN)


def export_projector(source: Path, out: Path, name: str, replace: bool = False) -> Iterator[Progress | Exported]:
    """Write the encoder of the model in `source` to the file `out`; `name` becomes its title. Yields progress, the result last.

    Raises UsageError if `out` exists (unless `replace`) or the model has no exportable encoder; DoesNotFit for a full disk.
    """
    out = Path(os.path.abspath(out))
    check_output_name(out)
    if is_gguf(source):
        raise UsageError(f"{source} is a GGUF file, whose mmproj file is one already", "leave out --mmproj")
    encoders, kind = require_encoders(source, read_config(source)), str(model_type_of(source))
    encoder, *_ = encoders.values()
    with tower_store(source) as store:
        check_target(out, replace, store)
        with encoder.source.saying():
            if kind == gemma4_export.NAME:
                tensors, keys = gemma4_export.file_tensors(encoders, store), gemma4_export.metadata(encoders, name)
            elif encoder.modality is AUDIO_INPUT:
                tensors, keys = audio_export.file_tensors(store, kind), audio_export.metadata(encoder, name, kind)
            else:
                tensors, keys = file_tensors(encoder, store, kind), metadata(encoder, name, kind)
        planned = [each.planned for each in tensors]
        head = gguf_head(keys, planned)
        done, total = len(head), len(head) + sum(padded(each.nbytes) for each in planned)
        with NewFile(out, total) as file:
            if (free := shutil.disk_usage(out.parent).free) < total:
                raise DoesNotFit(f"{out.name} needs {format_size(total)}, and the disk of {out.parent} has {format_size(free)} free",
                                 "make room, or give a place on another disk with -o")
            file.write(head)
            for each in tensors:
                data = each.bytes_of(store)
                file.write(memoryview(data).cast("B"))
                file.write(bytes(padded(each.planned.nbytes) - each.planned.nbytes))
                done += padded(each.planned.nbytes)
                yield Progress("exporting", done, total, "bytes", each.planned.name)
            store.check_unchanged()
            check_target(out, replace, store)
            file.commit()
    counts = {each: sum(tensor.type == each for tensor in planned) for each in dict.fromkeys(tensor.type for tensor in planned)}
    yield Exported(out, total, len(planned), counts)
