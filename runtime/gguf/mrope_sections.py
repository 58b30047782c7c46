"""M-RoPE sections of GGUF files of multimodal models: channel pairs for time, height and width, which are the same position in text. A
channel pair outside every section would not rotate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...offload.gguf_header import GgufHeader, shown_value
from ...offload.safetensors_header import CheckpointError, damaged

if TYPE_CHECKING:
    from ..config import ModelConfig

KEY = "rope.dimension_sections"
FOUR_AXES = "hunyuan_vl"
MAX_CHANNEL_PAIRS = 1 << 16
# Multimodal architectures whose text models are supported -> whether the sections are interleaved.
INTERLEAVED = {"glm4": False, "glm4moe": False, "hunyuan_vl": False, "paddleocr": False, "qwen2vl": False, "qwen3vl": True,
               "qwen3vlmoe": True}

HEAD_COUNT_FIELDS = {"q": "num_attention_heads", "k": "num_key_value_heads"}
REORDERED_QK = "glm4"  # rotates neighbouring channels, but halves in files with sections


def gguf_row_order(header: GgufHeader, config: ModelConfig, name: str) -> np.ndarray | None:
    """The file's row for each row of q or k, which files with sections store in another order; None for other tensors."""
    arch = header.metadata.get("general.architecture")
    part = next((part for part in HEAD_COUNT_FIELDS if f".{part}_proj." in name), None)
    if arch != REORDERED_QK or part is None or f"{arch}.{KEY}" not in header.metadata:
        return None
    return np.argsort(half_split_rows(config, part))


def half_split_rows(config: ModelConfig, part: str) -> np.ndarray:
    """The checkpoint's row of q or k for each of the file's, int64 [rows]. `part` is q or k."""
    head_dim, channels = config.head_dim, np.arange(config.head_dim)
    rotary_dims = int(head_dim * config.rope.partial_rotary_factor)
    channels[:rotary_dims] = channels[:rotary_dims].reshape(-1, 2).T.reshape(-1)
    return (np.arange(getattr(config, HEAD_COUNT_FIELDS[part]))[:, None] * head_dim + channels).reshape(-1)


def check(header: GgufHeader, name: str, channel_pairs: int, interleaved: bool) -> None:
    """Raises CheckpointError for sections with which text would not rotate as without them.

    channel_pairs: rotated channel pairs of a head.
    interleaved: pairs alternate between the three sections as long as each lasts; otherwise sections are consecutive.
    """
    key, path = f"{name}.{KEY}", header.path
    stated_sections = header.metadata.get(key)
    if stated_sections is None:
        return
    if not isinstance(stated_sections, np.ndarray) or stated_sections.dtype.kind not in "iu" or not 3 <= len(stated_sections) <= 4 \
            or (stated_sections < 0).any() or (stated_sections > MAX_CHANNEL_PAIRS).any():
        damaged(path, f"states {key} {shown_value(stated_sections)}, expected three or four whole numbers")
    total = int(stated_sections.sum())
    # The fourth section is not of text, except in one family whose images have four axes.
    sections = stated_sections[: 4 if name == FOUR_AXES else 3].astype(np.int64)
    positions = np.arange(min(channel_pairs, MAX_CHANNEL_PAIRS)) % max(total, 1)
    if not total or (positions >= (3 * sections[positions % 3] if interleaved else sections.sum())).any():
        raise CheckpointError(f"{path} states {key} {stated_sections.tolist()} for {channel_pairs} pairs of channels, "
                              "which is not supported",
                              "give the folder of the original checkpoint")
