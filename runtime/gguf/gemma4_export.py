"""Exports the vision and audio encoders of Gemma 4 as one mmproj file, as llama.cpp's converter writes it: the inverse of
`projector_config.py` and `audio_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ... import UsageError
from ...offload.checkpoint import TensorStore
from ...offload.gguf_header import Value
from ...offload.safetensors_header import TensorInfo
from ..audio.causal_conformer import CONFIG_DEFAULTS
from ..audio.gemma4 import Gemma4 as Ears
from ..audio.gemma_mel import GEMMA_4, GemmaLogMel
from ..config_reader import Keys
from ..images.gemma4 import THETA
from ..images.gemma4 import Gemma4 as Eyes
from ..images.modality import AUDIO_INPUT, IMAGE_INPUT, Modality
from ..images.tower_ops import silu
from ..images.tower_weights import HEARING_PARTS, canonical_name, is_of_tower
from ..images.vision_transformer import layer_count
from .audio_export import OMIT_MMPROJ_HINT, gguf_name
from .audio_names import AUDIO_PROJECTORS
from .projector_names import CLIP, PROJECTORS
from .projector_tensors import ProjectorTensor, projector_tensor

NAME, TYPES = "gemma4", {IMAGE_INPUT: "gemma4v", AUDIO_INPUT: "gemma4a"}
IMAGE_SIZE = 224  # required by readers, unused by the model
EPS, AUDIO_EPS = 1e-6, 1e-5  # the model has 1e-6 for both; the converter writes 1e-5 for audio
POOLING_KERNEL, TOKENS_PER_IMAGE = 3, 280  # of every published model
Encoders = Mapping[Modality, Eyes | Ears]


def metadata(encoders: Encoders, name: str) -> dict[str, Value]:
    """Metadata of the file. Raises UsageError for settings that such a file cannot state."""
    keys: dict[str, Value] = {}
    if (vision := encoders.get(IMAGE_INPUT)) is not None:
        _check_vision_defaults(vision)
        keys |= {f"vision.{key}": value for key, value in {
            "image_size": IMAGE_SIZE, "patch_size": vision.patch, "embedding_length": vision.width,
            "feed_forward_length": vision.tower_config.integer("intermediate_size"), "block_count": layer_count(vision),
            "attention.head_count": vision.heads,
            "projection_dim": vision.config.hidden_size, "attention.layer_norm_epsilon": EPS, "image_mean": np.zeros(3, np.float32),
            "image_std": np.ones(3, np.float32)}.items()}
    if (audio := encoders.get(AUDIO_INPUT)) is not None:
        _check_audio_defaults(audio)
        sizes = audio.sizes
        keys |= {f"audio.{key}": value for key, value in {
            "embedding_length": sizes.width, "feed_forward_length": 4 * sizes.width, "block_count": sizes.layers,
            "attention.head_count": sizes.heads, "projection_dim": audio.config.hidden_size, "attention.layer_norm_epsilon": AUDIO_EPS,
            "num_mel_bins": sizes.bands}.items()}
    present = {"vision": vision is not None, "audio": audio is not None}
    kinds = {f"{part}.projector_type": TYPES[modality] for part, modality in zip(present, TYPES, strict=True) if present[part]}
    return {"general.architecture": CLIP, "general.name": name, "general.type": "mmproj", "general.file_type": 1,
            **{f"{CLIP}.{key}": value for key, value in {**{f"has_{part}_encoder": has for part, has in present.items()}, **kinds,
                                                         **keys}.items()}}


def _check_vision_defaults(vision: Eyes) -> None:
    keys = vision.tower_config
    matches = (vision.joined, vision.count, keys.number("rms_norm_eps"), vision.theta(THETA), keys.raw.get("hidden_activation"),
               vision.bidirectional) == (POOLING_KERNEL, TOKENS_PER_IMAGE, EPS, THETA, "gelu_pytorch_tanh",
                                         not vision.config.per_layer_input_dim)
    if not matches or any(vision.scale.mean) or set(vision.scale.std) != {1.0}:
        raise UsageError("its vision tower differs from other Gemma 4 models in more than sizes, which an mmproj file cannot state",
                         OMIT_MMPROJ_HINT)


def _check_audio_defaults(audio: Ears) -> None:
    sizes, defaults = audio.sizes, Keys(CONFIG_DEFAULTS)
    back, block = defaults.integer("attention_context_left") - 1, defaults.integer("attention_chunk_size")
    matches = (sizes.chunk, sizes.left_context, sizes.right_context, sizes.residual_weight, sizes.softcap, sizes.eps, sizes.activation) == (
        block, back, 0, defaults.number("residual_weight"), defaults.number("attention_logit_cap"), EPS, silu)
    if not matches or audio.mel != GemmaLogMel.read(Keys({"feature_size": sizes.bands}), GEMMA_4):
        raise UsageError("its audio tower differs from other Gemma 4 models in more than sizes, which an mmproj file cannot state",
                         OMIT_MMPROJ_HINT)


def file_tensors(encoders: Encoders, store: TensorStore) -> list[ProjectorTensor]:
    """The tensors of the file in the checkpoint's order. Raises CheckpointError for one that no such file has."""
    stored = {canonical_name(name): info for name, info in store.tensors.items() if is_of_tower(name, NAME)}
    return [tensor for checkpoint_name, info in stored.items() for tensor in _map_tensor(checkpoint_name, info, encoders, store)]


def _map_tensor(checkpoint_name: str, info: TensorInfo, encoders: Encoders, store: TensorStore) -> Iterator[ProjectorTensor]:
    modality = AUDIO_INPUT if checkpoint_name.startswith(HEARING_PARTS) else IMAGE_INPUT
    if modality not in encoders:
        return
    name = gguf_name(checkpoint_name, AUDIO_PROJECTORS[TYPES[modality]] if modality is AUDIO_INPUT else PROJECTORS[TYPES[modality]], store,
                     modality)
    if not info.shape:
        yield projector_tensor(name, info, lambda values: values.reshape(1), (1,))
    elif checkpoint_name.endswith("per_dim_scale"):
        yield projector_tensor(name, info, lambda values: np.logaddexp(0, values.astype(np.float64)))
    elif checkpoint_name.endswith("depthwise_conv1d.weight"):
        yield projector_tensor(name, info, lambda values: values[:, 0], (info.shape[0], info.shape[-1]))
    elif checkpoint_name.endswith("patch_embedder.input_proj.weight"):
        side = encoders[IMAGE_INPUT].patch
        yield projector_tensor(name, info, lambda values: values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2), (info.shape[0], 3, side,
            side))
    else:
        yield projector_tensor(name, info)
