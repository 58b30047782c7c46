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
# Key below `clip.vision.` -> key of vision_config.
VISION_KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
               "attention.head_count": "num_attention_heads", "image_size": "image_size", "patch_size": "patch_size",
               "attention.layer_norm_epsilon": "layer_norm_eps"}
# Key below `clip.audio.` -> key of audio_config.
AUDIO_KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
              "attention.head_count": "num_attention_heads", "num_mel_bins": "num_mel_bins"}
LAYERLESS_KEYS = {"patch_size": "patch_size"}  # those of VISION_KEYS that a projector without layers has
MODALITY_NAMES = {IMAGE_INPUT: "vision", AUDIO_INPUT: "audio"}  # in keys
Values = Mapping[str, object]


@dataclass(frozen=True)
class ProjectorConfig:
    """What an mmproj file states of one modality, as the checkpoint's JSON files would."""

    config: Mapping[str, object]  # config.json
    processor: Mapping[str, object]  # preprocessor_config.json
    projector: Projector  # tensor names
    deepstack_layers: tuple[int, ...]  # encoder layers whose features are added to early layers of the text model
    ffn_swapped: bool  # the file swaps the names of the FFN's two matrices
    heads: int  # attention heads; 0 if the file states none, or for audio
    modality: Modality = IMAGE_INPUT


def projector_types(header: GgufHeader) -> dict[Modality, object]:
    """The projector type of each modality in a file. Raises CheckpointError for a file that is not an mmproj file."""
    path, data, types = header.path, header.metadata, {}
    has = {modality: data.get(HAS_ENCODER_KEY.format(name)) is True for modality, name in MODALITY_NAMES.items()}
    for modality, name in MODALITY_NAMES.items():
        common = data.get(TYPE_KEY) if has[modality] or modality is IMAGE_INPUT and not has[AUDIO_INPUT] else None
        if (projector_type := data.get(MODALITY_TYPE_KEY.format(name), common)) is not None:
            types[modality] = projector_type
    if data.get("general.architecture") != CLIP or not types:
        raise CheckpointError(f"{path} is of architecture {shown(data.get('general.architecture'))}, not a projector",
                              "--mmproj takes the file beside the model's, named mmproj-*.gguf")
    return types


def projector_config(header: GgufHeader, text_architecture: str, modality: Modality = IMAGE_INPUT) -> ProjectorConfig:
    """Read what a file states of a modality, for a text model of architecture `text_architecture`.

    Raises CheckpointError for an unsupported projector type, a text model that it does not fit, and a missing key.
    """
    path, data, projector_type = header.path, header.metadata, projector_types(header)[modality]
    known = AUDIO_PROJECTORS if modality is AUDIO_INPUT else PROJECTORS
    if not isinstance(projector_type, str) or projector_type not in known:
        raise CheckpointError(f"{path} has a projector of type {shown(projector_type)}, which is not supported",
                              f"known: {', '.join(known)}; text-only works")
    projector = replace(known[projector_type], deinterleaved_qk=False) if data.get(ROWS_IN_ORDER) else known[projector_type]
    if projector.text_architectures and text_architecture not in projector.text_architectures:
        raise CheckpointError(f"{path} has a projector of type {projector_type}, which goes with models of architecture "
                              f"{' or '.join(projector.text_architectures)}, not {shown(text_architecture)}",
                              "use the mmproj file of this model")
    if modality is AUDIO_INPUT:
        return _audio_config(header, text_architecture, projector_type, projector)
    from .vision_config import BUILDERS

    keys = _modality_keys(header)
    tower = _tower_config(header, keys, VISION_PREFIX, VISION_KEYS if projector.layer_names else LAYERLESS_KEYS)
    deepstack_layers = tuple(sorted({int(match[1]) for name in header.tensors if (match := DEEPSTACK_TENSOR.fullmatch(name))}))
    config, processor = BUILDERS[projector_type](header, keys, tower, text_architecture)
    heads = tower.get("num_attention_heads")
    image_statistics = {name: keys[name] for name in ("image_mean", "image_std") if name in keys}
    return ProjectorConfig(config, {**image_statistics, **processor}, projector, deepstack_layers,
                           _is_ffn_swapped(header, tower.get("hidden_size"), projector_type),
                           heads if type(heads) is int else 0)


def _audio_config(header: GgufHeader, text_architecture: str, projector_type: str, projector: Projector) -> ProjectorConfig:
    from .audio_config import BUILDERS as HEARING_BUILDERS

    keys = _modality_keys(header, AUDIO_PREFIX)
    tower = _tower_config(header, keys, AUDIO_PREFIX, AUDIO_KEYS if projector.layer_names else {})
    config, extractor = HEARING_BUILDERS[projector_type](header, Keys(keys, f"{header.path}: {CLIP}.audio"), tower, text_architecture)
    return ProjectorConfig(config, extractor, projector, (), False, 0, AUDIO_INPUT)


def _tower_config(header: GgufHeader, keys: Values, prefix: str, names: Mapping[str, str]) -> dict[str, object]:
    """The encoder's sizes by their config.json keys. Raises CheckpointError for a missing one."""
    for gguf_key in names:
        if gguf_key not in keys:
            damaged(header.path, f"lacks key {prefix}{gguf_key}")
    return {config_key: keys[gguf_key] for gguf_key, config_key in names.items()}


def _modality_keys(header: GgufHeader, prefix: str = VISION_PREFIX) -> dict[str, object]:
    """The keys below `prefix` as JSON values, and the FFN's activation flags."""
    def to_json(value: object) -> object:
        return [bool(each) if value.dtype == np.uint8 else each for each in value.tolist()] if isinstance(value, np.ndarray) else value

    keys = {key.removeprefix(prefix): to_json(value) for key, value in header.metadata.items() if key.startswith(prefix)}
    for name in ("use_gelu", "use_silu"):
        keys[name] = header.metadata.get(f"{CLIP}.{name}", False) is True
    return keys


def _is_ffn_swapped(header: GgufHeader, width: object, projector_type: object) -> bool:
    """Whether the names of the FFN's two matrices are swapped, as by early writers: `ffn_down` has the encoder's width as its input."""
    ffn_down = header.tensors.get("v.blk.0.ffn_down.weight")
    if ffn_down is None or len(ffn_down.shape) != 2:
        return False
    return ffn_down.shape[1] == width and (ffn_down.shape[0] != width or projector_type == "mlp")


def require_tensor(header: GgufHeader, name: str) -> GgufTensor:
    """A tensor by name. Raises CheckpointError where the file lacks it."""
    if name not in header.tensors:
        damaged(header.path, f"holds no tensor {name}")
    return header.tensors[name]
