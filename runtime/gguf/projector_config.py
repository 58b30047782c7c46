"""Translates the keys of an mmproj file to its checkpoint's config.json and preprocessor_config.json.

What the file leaves implicit (image resizing and its filter) is taken from the family's checkpoints. Projector types are in
`projector_names.py`, their keys in `vision_config.py`; audio in `audio_names.py` and `audio_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...offload.gguf_header import GgufHeader, GgufTensor
from ...offload.safetensors_header import CheckpointError, damaged, shown
from ..config_reader import Keys
from ..images.modality import AUDIO_INPUT, IMAGE_INPUT, Modality
from .audio_names import AUDIO_PROJECTORS
from .ollama_layout import ROWS_IN_ORDER
from .projector_names import CLIP, DEEPSTACK_TENSOR, PROJECTORS, Projector

VISION_PREFIX, AUDIO_PREFIX = f"{CLIP}.vision.", f"{CLIP}.audio."
TYPE_KEY, HAS_ENCODER_KEY = "clip.projector_type", "clip.has_{}_encoder"
MODALITY_TYPE_KEY = "clip.{}.projector_type"  # in files with a vision and an audio encoder
# Below `clip.vision.` -> of a tower in config.json; below `clip.audio.` those of HEARD.
VISION_KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads", "image_size": "image_size", "patch_size": "patch_size",
        "attention.layer_norm_epsilon": "layer_norm_eps"}
AUDIO_KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
         "attention.head_count": "num_attention_heads", "num_mel_bins": "num_mel_bins"}
LAYERLESS_KEYS = {"patch_size": "patch_size"}  # of KEYS, those of what has no layers
MODALITY_NAMES = {IMAGE_INPUT: "vision", AUDIO_INPUT: "audio"}  # of senses, in keys
Values = Mapping[str, object]

@dataclass(frozen=True)
class ProjectorConfig:
    """`config` and `processor` are the two JSON files'; `projector` says how tensors are called, those of `deep` layers by number, which
    are those of one `modality`."""

    config: Mapping[str, object]
    processor: Mapping[str, object]
    projector: Projector
    deep: tuple[int, ...]
    swapped: bool
    heads: int
    modality: Modality = IMAGE_INPUT


def projector_types(header: GgufHeader) -> dict[Modality, object]:
    """The type of what a file sees with, and of what it hears with. Raises CheckpointError for what is no such file."""
    path, data, found = header.path, header.metadata, {}
    has = {modality: data.get(HAS_ENCODER_KEY.format(name)) is True for modality, name in MODALITY_NAMES.items()}
    for modality, name in MODALITY_NAMES.items():
        common = data.get(TYPE_KEY) if has[modality] or modality is IMAGE_INPUT and not has[AUDIO_INPUT] else None
        if (kind := data.get(MODALITY_TYPE_KEY.format(name), common)) is not None:
            found[modality] = kind
    if data.get("general.architecture") != CLIP or not found:
        raise CheckpointError(f"{path} is of architecture {shown(data.get('general.architecture'))}, not a projector",
                              "--mmproj takes the file beside the model's, named mmproj-*.gguf")
    return found


def projector_config(header: GgufHeader, text: str, modality: Modality = IMAGE_INPUT) -> ProjectorConfig:
    """What a file that has this sense says of it, beside a text part of architecture `text`. Raises CheckpointError for a type that is not
    read, or for a key that is lacking."""
    path, data, kind = header.path, header.metadata, projector_types(header)[modality]
    known = AUDIO_PROJECTORS if modality is AUDIO_INPUT else PROJECTORS
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(f"{path} has a projector of type {shown(kind)}, which is not supported",
                              f"known: {', '.join(known)}; text-only works")
    projector = replace(known[kind], deinterleaved_qk=False) if data.get(ROWS_IN_ORDER) else known[kind]
    if projector.text_architectures and text not in projector.text_architectures:
        raise CheckpointError(f"{path} has a projector of type {kind}, which goes with models of architecture "
                              f"{' or '.join(projector.text_architectures)}, not {shown(text)}", "use the mmproj file of this model")
    if modality is AUDIO_INPUT:
        return _audio_config(header, text, kind, projector)
    from .vision_config import BUILDERS

    keys = _modality_keys(header)
    tower = _tower_config(header, keys, VISION_PREFIX, VISION_KEYS if projector.layer_names else LAYERLESS_KEYS)
    deep = tuple(sorted({int(found[1]) for name in header.tensors if (found := DEEPSTACK_TENSOR.fullmatch(name))}))
    config, processor = BUILDERS[kind](header, keys, tower, text)
    heads = tower.get("num_attention_heads")
    look = {name: keys[name] for name in ("image_mean", "image_std") if name in keys}
    return ProjectorConfig(config, {**look, **processor}, projector, deep, _is_ffn_swapped(header, tower.get("hidden_size"), kind),
                     heads if type(heads) is int else 0)


def _audio_config(header: GgufHeader, text: str, kind: str, projector: Projector) -> ProjectorConfig:
    from .audio_config import BUILDERS as HEARING_BUILDERS

    keys = _modality_keys(header, AUDIO_PREFIX)
    tower = _tower_config(header, keys, AUDIO_PREFIX, AUDIO_KEYS if projector.layer_names else {})
    config, extractor = HEARING_BUILDERS[kind](header, Keys(keys, f"{header.path}: {CLIP}.audio"), tower, text)
    return ProjectorConfig(config, extractor, projector, (), False, 0, AUDIO_INPUT)


def _tower_config(header: GgufHeader, keys: Values, before: str, names: Mapping[str, str]) -> dict[str, object]:
    for theirs in names:
        if theirs not in keys:
            damaged(header.path, f"lacks key {before}{theirs}")
    return {ours: keys[theirs] for theirs, ours in names.items()}


def _modality_keys(header: GgufHeader, before: str = VISION_PREFIX) -> dict[str, object]:
    """Those of a tower, as JSON would have them, and what curve its FFN has."""
    def plain(value: object) -> object:
        return [bool(each) if value.dtype == np.uint8 else each for each in value.tolist()] if isinstance(value, np.ndarray) else value

    found = {key.removeprefix(before): plain(value) for key, value in header.metadata.items() if key.startswith(before)}
    for name in ("use_gelu", "use_silu"):
        found[name] = header.metadata.get(f"{CLIP}.{name}", False) is True
    return found


def _is_ffn_swapped(header: GgufHeader, width: object, kind: object) -> bool:
    """Whether the FFN's second matrix is called its first: in files of early writers it has as many inputs as the tower is wide."""
    first = header.tensors.get("v.blk.0.ffn_down.weight")
    return first is not None and len(first.shape) == 2 and first.shape[1] == width and (first.shape[0] != width or kind == "mlp")


def require_tensor(header: GgufHeader, name: str) -> GgufTensor:
    if name not in header.tensors:
        damaged(header.path, f"holds no tensor {name}")
    return header.tensors[name]
