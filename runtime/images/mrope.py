"""Multimodal rotary positions (M-RoPE): a token has three, for time, row and column.

A text token has three equal ones, which is plain RoPE. After an image of h rows and w columns text continues max(h, w) positions later,
whatever its token count. Both follow from the token ids alone, which carry the column count, so positions are known even if the image is no
longer in memory. Frames of a video share rows and columns and differ in time. Families assign channel pairs to the three in contiguous
sections or interleaved.

HunyuanVL (XD-RoPE) has a fourth, sequential position for every token, so text after an image continues as after text. Image tokens also
have positions for column, line and image number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..config_rope import GLOBAL, LOCAL
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded

if TYPE_CHECKING:
    from ..config import ModelConfig

# model_type -> default section sizes, and whether sections are interleaved.
SECTIONS = {"ernie4_5_moe_vl": ((22, 22, 20), False), "ernie4_5_vl_moe": ((22, 22, 20), False), "glm46v": ((8, 12, 12), False),
            "glm4v": ((8, 12, 12), False), "glm4v_moe": ((8, 12, 12), False), "glm_ocr": ((8, 12, 12), False),
            "glmga": ((8, 12, 12), False),
            "paddleocr_vl": ((16, 24, 24), False), "qwen2_vl": ((16, 24, 24), False), "qwen2_5_vl": ((16, 24, 24), False),
            "qwen2_5_omni": ((16, 24, 24), False), "qwen3_omni_moe": ((24, 20, 20), True), "qwen3_vl": ((24, 20, 20), True),
            "qwen3_vl_moe": ((24, 20, 20), True), "qwen3_5": ((11, 11, 10), True), "qwen3_5_moe": ((11, 11, 10), True),
            "minicpmv4_7": ((11, 11, 10), True), "hunyuan_vl": ((16, 16, 16, 16), False), "cohere_compass": ((24, 20, 20), True)}
# Row and column sections are interleaved with each other, followed by time.
HEIGHT_WIDTH_INTERLEAVED = ("ernie4_5_moe_vl", "ernie4_5_vl_moe")
ORDERED = ("hunyuan_vl",)  # image tokens have a sequential position too (XD-RoPE)
ORDER = 3  # number of the first axis of ORDERED families
SECTION_KEYS = ("mrope_section", "xdrope_section")  # config keys of the sections
FIRST_MEDIA_ID = 1 << 62  # media ids start here: 36 bits of hash, 11 of columns, 15 of row
HASH_BITS, COLUMN_BITS, ROW_BITS = 36, 11, 15
FRAME_STEP = 512  # the first row of a later video frame carries this plus the position step since the last frame, instead of columns


def media_token_id(number: int, columns: int, row: int) -> int:
    """Token id of an image's row. `columns`: of the image, 0 for a row that is positioned like text."""
    return FIRST_MEDIA_ID | (number << COLUMN_BITS | columns) << ROW_BITS | row


def split_media_token(token: int) -> tuple[int, int, int]:
    """(number, columns, row) of a media token id."""
    rest = token & FIRST_MEDIA_ID - 1
    return rest >> COLUMN_BITS + ROW_BITS, rest >> ROW_BITS & (1 << COLUMN_BITS) - 1, rest & (1 << ROW_BITS) - 1


def mrope_axes(folder: Path, config: ModelConfig) -> np.ndarray | None:
    """Which of a token's positions rotates each channel pair, int64 [pairs], counted from ORDER for ORDERED families; None for plain RoPE.
    Raises UsageError."""
    raw = json.loads(read_bounded(folder / "config.json", MAX_JSON_NBYTES)) if (folder / "config.json").is_file() else {}
    if raw.get("model_type") not in SECTIONS:
        return None
    inner = raw.get("thinker_config") or raw
    inner = inner.get("text_config") or inner
    section = {**(inner.get("rope_scaling") or {}), **(inner.get("rope_parameters") or {})}
    axes = []
    for rope in [section[kind] for kind in (GLOBAL, LOCAL) if isinstance(section.get(kind), dict)] or [section]:
        name = next((name for name in SECTION_KEYS if rope.get(name) is not None), SECTION_KEYS[0])
        axes.append(section_axes(raw["model_type"], rope.get(name), config, f"config.json: {name}"))
    if not np.array_equal(axes[0], axes[-1]):  # sliding and full layers, where both use RoPE
        raise UsageError(f"config.json: {GLOBAL} and {LOCAL} have different M-RoPE sections, which is not supported",
                         "fetch the model's files again; text-only works")
    return axes[0]


def section_axes(kind: str, stated: object, config: ModelConfig, where: str) -> np.ndarray | None:
    """As `mrope_axes`, for a model type whose sections are `stated` at `where`, or None for its defaults."""
    if kind not in SECTIONS:
        return None
    default_sections, is_interleaved = SECTIONS[kind]
    stated = default_sections if stated is None else stated
    rope = next(rope for rope in config.ropes if rope is not None)
    pairs = int(config.head_dim * rope.partial_rotary_factor) // 2
    counts = (3, 4) if kind in ORDERED else (3,)
    if not isinstance(stated, list | tuple) or len(stated) not in counts or not all(type(each) is int for each in stated) \
            or min(stated) < 0 or sum(stated) != pairs:
        raise UsageError(f"{where} is {stated!r:.60}, which does not add up to {pairs} channel pairs",
                         "fetch the model's files again; text-only works")
    if kind in ORDERED:  # with three sections, none is for the sequential position
        return np.repeat(np.arange(4)[-len(stated) :], stated) + ORDER
    if kind in HEIGHT_WIDTH_INTERLEAVED:
        if stated[0] != stated[1]:
            raise UsageError(f"{where} is {stated!r:.60}, with different sizes for rows and columns",
                             "fetch the model's files again; text-only works")
        return np.concatenate([np.tile([1, 2], stated[0]), np.zeros(stated[2], np.int64)])
    if not is_interleaved:
        return np.repeat(np.arange(3), stated)
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * stated[axis] : 3] = axis
    return axes


@dataclass
class MropePositions:
    """Tracks the positions of a sequence."""

    tokens: list[int]  # the sequence, append-only
    num_tracked: int = 0  # how many of them are done
    next_text_position: int = 0
    # Of the image that the tracked tokens end in: its number, columns, first row of the frame, position, and frame offset.
    run: tuple[int, int, int, int, int] | None = None
    FIRST = 0  # first axis number

    def next_position(self, token: int) -> tuple[int, int, int]:
        """Position triple of the next token."""
        number, tag, row = split_media_token(token) if token >= FIRST_MEDIA_ID else (0, 0, 0)
        if not tag:  # text, or a row that is positioned like text
            self.next_text_position, self.run = self.next_text_position + 1, None
            return (self.next_text_position - 1,) * 3
        if self.run is None or self.run[0] != number or not row:
            self.run = number, tag, row - row % tag, self.next_text_position, 0
        elif tag != self.run[1]:  # the first row of a later video frame
            _, columns, _, start, frame_offset = self.run
            self.run = number, columns, row, start, frame_offset + max(tag - FRAME_STEP, 0)
        _, columns, first_row, start, frame_offset = self.run
        line, column = divmod(row - first_row, columns)
        self.next_text_position = max(self.next_text_position, start + max(line + 1, columns, frame_offset + 1))
        return start + frame_offset, start + line, start + column

    def positions_after(self, ids: Sequence[int], axes: np.ndarray) -> np.ndarray | None:
        """Positions of tokens appended to the sequence: int64 [T], or [T, pairs] with media among them; None where they are sequential."""
        triples = self.position_triples(ids)
        if any(token >= FIRST_MEDIA_ID for token in ids):
            return triples[:, axes - self.FIRST]
        return None if self.next_text_position == self.num_tracked else triples[:, 0]

    def position_triples(self, ids: Sequence[int]) -> np.ndarray:
        """Position triples of tokens appended to the sequence, int64 [T, 3] or, for ORDERED families, [T, 4]."""
        for token in self.tokens[self.num_tracked :]:
            self.next_position(token)
        self.num_tracked = len(self.tokens)
        lookahead = replace(self)
        return np.array([lookahead.next_position(token) for token in ids], np.int64)


@dataclass
class OrderedMropePositions(MropePositions):
    """For ORDERED families. An image's first and last row are positioned like text, so their ids carry no column count; its lines begin
    with the second row."""

    num_images: int = 0  # how many have begun
    FIRST = ORDER

    def next_position(self, token: int) -> tuple[int, int, int, int]:
        """The four positions of the next token: sequence, column, line, image."""
        _, columns, row = split_media_token(token) if token >= FIRST_MEDIA_ID else (0, 0, 1)
        position, self.next_text_position = self.next_text_position, self.next_text_position + 1
        self.num_images += not row
        if not columns:
            return (position,) * 4
        line, column = divmod(row - 1, columns)
        return position, column, line, self.num_images - 1


def track_positions(tokens: list[int], axes: np.ndarray, markers: tuple[int, ...] = ()) -> MropePositions:
    """Position tracker for a sequence; `markers` in families with a canvas."""
    if markers:
        from .canvas import CanvasPositions

        return CanvasPositions(tokens, markers=markers)
    return (OrderedMropePositions if axes.min() >= ORDER else MropePositions)(tokens)
