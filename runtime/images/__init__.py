"""Image, video and audio input: towers that encode media into embedding rows, and the placeholder tokens around them.

A family with vision has a `MediaEncoder` that knows its preprocessing and its tower; a family with audio has one for audio, and a family
with both has two. The rest of the program sees media only as token ids (`media.py`), as markers in a text (`media_markers.py`) or as files
(`image_file.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ... import EffllmError, UsageError
from ..audio import AUDIO_ENCODERS, AUDIO_SECTIONS, takes_audio
from ..config_reader import resolve_shared_model_type
from ..families import COMPOSITE, NEMOTRON_OMNI
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from .modality import AUDIO_INPUT, IMAGE_INPUT, Modality

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig
    from .tower_source import TowerSource
    from .video_file import Frame

ROW_PLACEHOLDER = -1  # in `EncodedMedia.tokens`: the position of the next row
# model_type -> module here; its `encoder(source, config)` returns a MediaEncoder.
VISION_ENCODERS: dict[str, str] = {
    "aya_vision": "aya_vision", "blip-2": "blip_2", "cohere2_vision": "cohere2_vision", "cohere_compass": "cohere_compass",
    "deepseek_ocr": "deepseek_ocr", "deepseek_ocr2": "deepseek_ocr2", "deepseek_vl": "deepseek_vl",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe", "ernie4_5_vl_moe": "ernie4_5_vl_moe", "exaone4_5": "exaone4_5", "fast_vlm": "fast_vlm",
    "gemma3": "gemma3", "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4_unified": "gemma4_unified", "glm46v": "glm4v",
    "glm5_next": "glm5_next", "glm4v": "glm4v", "glm4v_moe": "glm4v", "glm_ocr": "glm4v", "glmga": "glm4v",
    "granite4_vision": "granite4_vision",
    "got_ocr2": "got_ocr2", "granite_docling": "granite_docling", "hunyuan_vl": "hunyuan_vl",
    "idefics2": "idefics2", "idefics3": "idefics3", "internvl": "internvl", "internvl_chat": "internvl_chat", "janus": "janus",
    "kimi_k25": "kimi_k25", "kimi_vl": "kimi_vl", "lfm2_vl": "lfm2_vl", "lfm3_vl": "lfm3_vl",
    "lighton_ocr": "pixtral", "llama4": "llama4", "llava": "llava", "llava_next": "llava_next", "llava_onevision": "llava_onevision",
    "llava_qwen2": "fast_vlm", "minicpm_ocr": "minicpmv4_6", "minicpmv4_6": "minicpmv4_6",
    "minicpmv4_7": "minicpmv4_6", "mistral3": "pixtral", "mistral_large4": "pixtral", "mllama": "mllama",
    "molmo2": "molmo2", **dict.fromkeys(NEMOTRON_OMNI, "nemotron_h_omni"),
    "ovis2": "ovis2",
    "paddleocr_vl": "paddleocr_vl", "paligemma": "paligemma", "perception_lm": "perception_lm",
    "qianfan_ocr": "qianfan_ocr",
    "qwen2_5_omni": "qwen2_5_omni", "qwen2_5_vl": "qwen2_5_vl", "qwen2_vl": "qwen2_vl", "qwen3_5": "qwen3_vl", "qwen3_5_moe": "qwen3_vl",
    "qwen3_omni_moe": "qwen3_omni_moe",
    "qwen3_vl": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl", "smolvlm": "idefics3", "unlimited_ocr": "unlimited_ocr"}
# Model types whose MLX folders were checked against the originals -> prefix of the tower's published tensor names.
MLX_VISION_PREFIXES: Mapping[str, str] = {"gemma3": "vision_tower.", "qwen2_5_vl": "visual.", "qwen2_vl": "visual.", "qwen3_5": "visual.",
                                 "qwen3_5_moe": "visual.", "qwen3_vl": "visual.", "qwen3_vl_moe": "visual."}


@dataclass(frozen=True)
class EncodedMedia:
    """What an encoder returns for one image, video or audio clip."""

    rows: np.ndarray  # float32 [n, hidden]: they replace the embeddings of the placeholder's tokens
    # What the placeholder in the prompt expands to: vocabulary ids, and ROW_PLACEHOLDER for each row.
    tokens: tuple[int, ...]
    # Rows and columns, for families with two-dimensional rotary positions; None for others.
    grid: tuple[int, int] | None = None
    bidirectional: bool = False  # tokens of one image attend to each other, later ones included
    sliding_window_only: bool = False  # bidirectional attention only in sliding-window layers
    # float32 [layers, n, hidden] (DeepStack, Qwen 3 VL): the k-th is added to the hidden states after the k-th of `deepstack_layers`.
    deepstack_rows: np.ndarray | None = None
    needs_adapter: bool = False  # the text model reads the rows through the LoRA adapter it was published with
    deepstack_layers: tuple[int, ...] | None = None  # layers of the text model; None for the first ones
    # Number of images before this one -> token ids that precede it; None if nothing does.
    prefix_tokens: Callable[[int], tuple[int, ...]] | None = None
    placeholder_id: int | None = None  # in families that cross-attend to the rows: the token id in the prompt
    num_border_rows: int = 0  # rows at either end whose positions are like text's
    layout_tags: tuple[int, ...] | None = None  # the layout tag in each row's token id (`canvas.py`)
    joint_attention: bool = False  # tokens of all images of a prompt attend to each other
    positions_per_second: float | None = None  # positions per second of video; None: each frame is one position after the last


class EncodingJob:
    """Progress of one encoding, set by the encoder, and its cancellation. Thread-safe."""

    def __init__(self) -> None:
        self.done, self.total, self.is_cancelled = 0, 0, False

    def raise_if_cancelled(self) -> None:
        """Raises EncodingCancelled."""
        if self.is_cancelled:
            raise EncodingCancelled


class EncodingCancelled(Exception):
    """The client of this encoding is gone."""


class MediaEncoder(Protocol):
    """Encodes the media of one modality for one model."""

    modality: Modality
    placeholder: str  # the text by which the chat template marks an item
    placeholder_text: str  # the placeholder with the text around it, for templates without media support
    threads: int | None  # None for as many as pay off
    joint_attention: bool  # all images of a prompt attend to each other
    shares_border: bool  # adjacent images share the token between them, and text after an image begins with a space
    # Of speech-to-text models: masks in place the tokens that may not follow. Arguments: ids so far, whether to translate, logits [V].
    constrain_logits: Callable[[Sequence[int], bool, np.ndarray], None] | None

    def encode(self, picture: np.ndarray, job: EncodingJob) -> EncodedMedia:
        """Encode an image uint8 [height, width, 3], a video [frames, height, width, 3] or audio float32 [samples]. Raises EncodingCancelled
        when `job` is cancelled."""

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """What to encode for a video: images, or clips where the tower takes several frames at once. Each is (caption before it, pixels,
        seconds between frames)."""

    def token_count(self, *size: int) -> int:
        """Number of tokens that an image (height, width), a video (frames, height, width) or audio (samples) takes, without encoding it."""

    def bytes_needed(self) -> int:
        """Memory of the tower's weights and its activations."""


def encoders_of(folder: Path, config: ModelConfig) -> dict[Modality, MediaEncoder | EffllmError]:
    """The encoders of a model folder by modality, or for each the error why it cannot be used; empty for a text-only model. Raises
    UsageError for a multimodal model whose towers are not supported."""
    raw = raw_config(folder)
    model_type, encoders = model_type_of(folder), {}
    for modality in modalities_of(raw):
        try:
            encoders[modality] = encoder_of(folder, config, modality)
        except EffllmError as error:
            encoders[modality] = error
    if not encoders and model_type in COMPOSITE:
        models = f"{model_type} models that MLX quantized" if is_mlx_quantized(raw) else f"{model_type} models"
        raise UsageError(f"images are not supported for {models}", "text-only works; docs/models.md lists the families with vision")
    return encoders


def encoder_of(folder: Path, config: ModelConfig, modality: Modality) -> MediaEncoder:
    """The encoder of a model folder for a modality that it has. Raises EffllmError."""
    from .tower_source import FolderSource

    return build_encoder(str(model_type_of(folder)), FolderSource(folder, modality), config, modality)


def build_encoder(kind: str, source: TowerSource, config: ModelConfig, modality: Modality = IMAGE_INPUT) -> MediaEncoder:
    """The encoder for a model type of VISION_ENCODERS or AUDIO_ENCODERS."""
    name = f"..audio.{AUDIO_ENCODERS[kind]}" if modality is AUDIO_INPUT else f".{VISION_ENCODERS[kind]}"
    return import_module(name, __name__).encoder(source, config)


def modalities_of(raw: Mapping[str, object]) -> tuple[Modality, ...]:
    """Modalities beside text that are supported for the model of a config.json."""
    if is_mlx_quantized(raw):
        return (IMAGE_INPUT,) * (raw.get("model_type") in MLX_VISION_PREFIXES)
    return (IMAGE_INPUT,) * (raw.get("model_type") in VISION_ENCODERS) + (AUDIO_INPUT,) * takes_audio(raw)


def is_mlx_quantized(raw: Mapping[str, object]) -> bool:
    """Whether MLX quantized the model: it transposes the towers (`mlx_tower.py`) or drops them."""
    return isinstance(raw.get("quantization"), dict)


def input_modalities(raw: Mapping[str, object]) -> str:
    """The modalities beside text that a config.json describes, as a phrase, supported or not; empty for none."""
    if raw.get("vision_config", raw) is None and raw.get("audio_config", raw) is None:  # an explicit null: there is no tower
        return ""
    modalities = modalities_of(raw)
    has_images = not modalities or IMAGE_INPUT in modalities
    has_audio = AUDIO_INPUT in modalities or any(raw.get(key) is not None for key in AUDIO_SECTIONS)
    return " and ".join([*("images",) * has_images, *("audio",) * has_audio])


def model_type_of(folder: Path) -> str | None:
    """model_type of a folder's config; None for a file, and for a config that `read_config` rejects with its own message."""
    kind = raw_config(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def raw_config(folder: Path) -> Mapping[str, object]:
    """The contents of config.json; empty where `model_type_of` is None."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_bounded(path, MAX_JSON_NBYTES)) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return resolve_shared_model_type(raw) if isinstance(raw, dict) and isinstance(raw.get("model_type"), str) else {}
