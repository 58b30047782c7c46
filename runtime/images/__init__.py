"""What a model makes of a picture: rows that stand in place of embeddings, and the tokens around them.

A family that sees has a `MediaEncoder`, which knows how its pictures are cut and what its tower computes; one that hears has one of its own
for sounds, and one that does both has two. All else of the program knows a picture
as tokens of its own (`media.py`), as a mark in a text (`media_markers.py`) or as a file (`image_file.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ... import EffllmError, UsageError
from ..audio import AUDIO_ENCODERS, SECTIONS, takes_audio
from ..config_reader import of_class
from ..families import COMPOSITE, NEMOTRON_OMNI
from ..files.bounded_read import JSON_NBYTES, read_bounded
from .modality import AUDIO_INPUT, IMAGE_INPUT, Modality

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig
    from .tower_source import TowerSource
    from .video_file import Frame

ROW_PLACEHOLDER = -1  # in `EncodedMedia.tokens`: here stands the next row
# Model type of a model that takes pictures -> the module here that sees for it: its `sight(source, config)` returns a Sight.
VISION_ENCODERS: dict[str, str] = {
    "aya_vision": "aya_vision", "blip-2": "blip_2", "cohere2_vision": "cohere2_vision", "cohere_compass": "cohere_compass",
    "deepseek_ocr": "deepseek_ocr", "deepseek_ocr2": "deepseek_ocr2", "deepseek_vl": "deepseek_vl",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe", "ernie4_5_vl_moe": "ernie4_5_vl_moe", "exaone4_5": "exaone4_5", "fast_vlm": "fast_vlm",
    "gemma3": "gemma3", "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4_unified": "gemma4_unified", "glm46v": "glm4v",
    "glm5_next": "glm5_next", "glm4v": "glm4v", "glm4v_moe": "glm4v", "glm_ocr": "glm4v",
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
# Those of which folders that MLX quantized were compared with what they were made of -> how names of their towers begin as published.
MLX_VISION_PREFIXES: Mapping[str, str] = {"gemma3": "vision_tower.", "qwen2_5_vl": "visual.", "qwen2_vl": "visual.", "qwen3_5": "visual.",
                                 "qwen3_5_moe": "visual.", "qwen3_vl": "visual.", "qwen3_vl_moe": "visual."}


@dataclass(frozen=True)
class EncodedMedia:
    """What a model makes of one picture: `rows` float32 [n, hidden] stand in place of embeddings. `tokens`: what the picture's one place in
    the prompt becomes, ids of the vocabulary and PLACE where a row stands, in order. `grid`: rows and columns of places for families whose
    rotary positions go by place, else None; `framed`: so many rows at either end are placed as words are. `bidirectional`: tokens of one
    picture see each other, also those behind them, and `together` those of all pictures of a text; `in_windows`: in layers with a window
    alone. `deep`: float32 [layers, n, hidden], of
    which the k-th is added to the rows' hidden states behind layer k of the text part (Qwen 3 VL), or behind layer `behind`[k], else None.
    `by_adapter`: rows are read by the LoRA adapter that the model was published with. `numbered`: tokens that stand before a picture, by
    how many are before it in a conversation, else None. `stated`: what each row's token states of how the picture is laid out on a canvas
    (`canvas.py`), else None. `pace`: how many positions a second is between frames of a film; None where the next frame is one later.
    `word`: of families whose layers attend to the rows, what their one place is in the
    vocabulary; else None."""

    rows: np.ndarray
    tokens: tuple[int, ...]
    grid: tuple[int, int] | None = None
    bidirectional: bool = False
    in_windows: bool = False
    deep: np.ndarray | None = None
    needs_adapter: bool = False
    behind: tuple[int, ...] | None = None
    numbered: Callable[[int], tuple[int, ...]] | None = None
    placeholder_id: int | None = None
    framed: int = 0
    stated: tuple[int, ...] | None = None
    together: bool = False
    pace: float | None = None


class EncodingJob:
    """Of a picture that is looked at: how much of what there is to do is done, which whoever looks says, and whether anybody waits for it
    yet. From any thread."""

    def __init__(self) -> None:
        self.done, self.total, self.is_cancelled = 0, 0, False

    def raise_if_cancelled(self) -> None:
        """Raises Left."""
        if self.is_cancelled:
            raise EncodingCancelled


class EncodingCancelled(Exception):
    """Nobody waits any more for what a picture is."""


class MediaEncoder(Protocol):
    """How one model sees, or hears, as `sense` says. `placeholder`: the text by which its template marks a picture; `written`: that, and
    what stands around it, where a template knows of no pictures. `threads`: how many compute; None for as many as pay on this machine.
    `together`: all pictures of a text see each other. `bordered`: the words on either side of a picture are one where
    two stand side by side, and a space follows where a word does. `narrowing`: of one that does nothing else than to write down
    what it hears, or a translation; takes away, in place, what may not come next of logits[V] behind ids, of which a sound is one."""

    modality: Modality
    placeholder: str
    written: str
    threads: int | None
    together: bool
    bordered: bool
    constrain_logits: Callable[[Sequence[int], bool, np.ndarray], None] | None

    def encode(self, picture: np.ndarray, work: EncodingJob) -> EncodedMedia:
        """Of a picture uint8 [height, width, 3], a film [frames, height, width, 3], or a sound float32 [samples]. Raises Left where `work`
        is left."""

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """Moments of a video as pictures, or films where several frames are seen as one: what stands before each, its points, and the
        seconds between what is seen as one and the next."""

    def token_count(self, *size: int) -> int:
        """Tokens that a picture of this size, a film, or a sound of so many samples, takes, known beforehand."""

    def bytes_needed(self) -> int:
        """Of the tower's weights and of what it computes with."""


def encoders_of(folder: Path, config: ModelConfig) -> dict[Modality, MediaEncoder | EffllmError]:
    """How the model of a folder sees and hears, each or why it cannot; empty for one that does neither. Raises UsageError for one whose
    pictures are not read."""
    raw = raw_config(folder)
    kind, found = model_type_of(folder), {}
    for modality in modalities_of(raw):
        try:
            found[modality] = encoder_of(folder, config, modality)
        except EffllmError as error:
            found[modality] = error
    if not found and kind in COMPOSITE:
        whose = f"{kind} models that MLX quantized" if is_mlx_quantized(raw) else f"{kind} models"
        raise UsageError(f"pictures of {whose} are not read", "text alone works; docs/models.md lists the families that see")
    return found


def encoder_of(folder: Path, config: ModelConfig, modality: Modality) -> MediaEncoder:
    """How the model of a folder, which has this sense, sees or hears. Raises EffllmError."""
    from .tower_source import FolderSource

    return build_encoder(str(model_type_of(folder)), FolderSource(folder, modality), config, modality)


def build_encoder(kind: str, source: TowerSource, config: ModelConfig, modality: Modality = IMAGE_INPUT) -> MediaEncoder:
    """The sight of a model type of SIGHTS, or of HEARING."""
    name = f"..audio.{AUDIO_ENCODERS[kind]}" if modality is AUDIO_INPUT else f".{VISION_ENCODERS[kind]}"
    return import_module(name, __name__).encoder(source, config)


def modalities_of(raw: Mapping[str, object]) -> tuple[Modality, ...]:
    """What the model of a config.json takes beside text, as far as it is read here."""
    if is_mlx_quantized(raw):
        return (IMAGE_INPUT,) * (raw.get("model_type") in MLX_VISION_PREFIXES)
    return (IMAGE_INPUT,) * (raw.get("model_type") in VISION_ENCODERS) + (AUDIO_INPUT,) * takes_audio(raw)


def is_mlx_quantized(raw: Mapping[str, object]) -> bool:
    """Has MLX quantized it, which turns towers (`mlx_tower.py`), or leaves them out?"""
    return isinstance(raw.get("quantization"), dict)


def input_modalities(raw: Mapping[str, object]) -> str:
    """What the model of a config.json takes beside text, in a word, of one whose pictures are not read as well; empty for nothing."""
    if raw.get("vision_config", raw) is None and raw.get("audio_config", raw) is None:  # which says that there is no tower
        return ""
    modalities = modalities_of(raw)
    seen = not modalities or IMAGE_INPUT in modalities
    heard = AUDIO_INPUT in modalities or any(raw.get(key) is not None for key in SECTIONS)
    return " and ".join([*("images",) * seen, *("sounds",) * heard])


def model_type_of(folder: Path) -> str | None:
    """The model type that the config of a folder states; None for a file, and for what `read_config` refuses in its own words."""
    kind = raw_config(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def raw_config(folder: Path) -> Mapping[str, object]:
    """What config.json says; nothing where `kind_of` is None."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_bounded(path, JSON_NBYTES)) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return of_class(raw) if isinstance(raw, dict) and isinstance(raw.get("model_type"), str) else {}
