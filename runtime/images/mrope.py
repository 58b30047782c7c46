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
from ..files.bounded_read import JSON_NBYTES, read_bounded

if TYPE_CHECKING:
    from ..config import ModelConfig

# model_type -> default section sizes, and whether sections are interleaved.
SECTIONS = {"ernie4_5_moe_vl": ((22, 22, 20), False), "ernie4_5_vl_moe": ((22, 22, 20), False), "glm46v": ((8, 12, 12), False),
            "glm4v": ((8, 12, 12), False), "glm4v_moe": ((8, 12, 12), False), "glm_ocr": ((8, 12, 12), False),
            "paddleocr_vl": ((16, 24, 24), False), "qwen2_vl": ((16, 24, 24), False), "qwen2_5_vl": ((16, 24, 24), False),
            "qwen2_5_omni": ((16, 24, 24), False), "qwen3_omni_moe": ((24, 20, 20), True), "qwen3_vl": ((24, 20, 20), True),
            "qwen3_vl_moe": ((24, 20, 20), True), "qwen3_5": ((11, 11, 10), True), "qwen3_5_moe": ((11, 11, 10), True),
            "minicpmv4_7": ((11, 11, 10), True), "hunyuan_vl": ((16, 16, 16, 16), False), "cohere_compass": ((24, 20, 20), True)}
# Row and column sections are interleaved with each other, followed by time.
HEIGHT_WIDTH_INTERLEAVED = ("ernie4_5_moe_vl", "ernie4_5_vl_moe")
ORDERED = ("hunyuan_vl",)  # image tokens have a sequential position too (XD-RoPE)
ORDER = 3  # of axes, which number is the first of a family that is IN_ORDER
SECTION_KEYS = ("mrope_section", "xdrope_section")  # config keys of the sections
FIRST_MEDIA_ID = 1 << 62  # media ids start here: 36 bits of hash, 11 of columns, 15 of row
HASH_BITS, COLUMN_BITS, ROW_BITS = 36, 11, 15
FRAME_STEP = 512  # the first row of a later video frame carries this plus the position step since the last frame, instead of columns


def media_token_id(number: int, columns: int, row: int) -> int:
    """Token id of a row of an image with so many columns, 0 where its position is like that of text."""
    return FIRST_MEDIA_ID | (number << COLUMN_BITS | columns) << ROW_BITS | row


def split_media_token(token: int) -> tuple[int, int, int]:
    """(number, columns, row) of a media token id."""
    rest = token & FIRST_MEDIA_ID - 1
    return rest >> COLUMN_BITS + ROW_BITS, rest >> ROW_BITS & (1 << COLUMN_BITS) - 1, rest & (1 << ROW_BITS) - 1


def mrope_axes(folder: Path, config: ModelConfig) -> np.ndarray | None:
    """Which of a token's positions rotates each channel pair, int64 [pairs], counted from ORDER for ORDERED families; None for plain RoPE.
    Raises UsageError."""
    raw = json.loads(read_bounded(folder / "config.json", JSON_NBYTES)) if (folder / "config.json").is_file() else {}
    if raw.get("model_type") not in SECTIONS:
        return None
    inner = raw.get("thinker_config") or raw
    inner = inner.get("text_config") or inner
    section = {**(inner.get("rope_scaling") or {}), **(inner.get("rope_parameters") or {})}
    found = []
    for own in [section[kind] for kind in (GLOBAL, LOCAL) if isinstance(section.get(kind), dict)] or [section]:
        name = next((name for name in SECTION_KEYS if own.get(name) is not None), SECTION_KEYS[0])
        found.append(section_axes(raw["model_type"], own.get(name), config, f"config.json: {name}"))
    if not np.array_equal(found[0], found[-1]):  # sliding and full layers, where both use RoPE
        raise UsageError(f"config.json: {GLOBAL} and {LOCAL} have different M-RoPE sections, which is not supported",
                         "fetch the model's files again; text-only works")
    return found[0]


def section_axes(kind: str, stated: object, config: ModelConfig, where: str) -> np.ndarray | None:
    """As `mrope_axes`, for a model type whose sections are `stated` at `where`, or None for its defaults."""
    if kind not in SECTIONS:
        return None
    usual, in_turns = SECTIONS[kind]
    stated = usual if stated is None else stated
    turned = next(each for each in config.ropes if each is not None)
    pairs = int(config.head_dim * turned.partial_rotary_factor) // 2
    counts = (3, 4) if kind in ORDERED else (3,)
    if not isinstance(stated, list | tuple) or len(stated) not in counts or not all(type(each) is int for each in stated) \
            or min(stated) < 0 or sum(stated) != pairs:
        raise UsageError(f"{where} is {stated!r:.60}, which does not add up to {pairs} channel pairs",
                         "fetch the model's files again; text-only works")
    if kind in ORDERED:  # with three sections there is none for the sequence
        return np.repeat(np.arange(4)[-len(stated) :], stated) + ORDER
    if kind in HEIGHT_WIDTH_INTERLEAVED:
        if stated[0] != stated[1]:
            raise UsageError(f"{where} is {stated!r:.60}, with different sizes for rows and columns",
                             "fetch the model's files again; text-only works")
        return np.concatenate([np.tile([1, 2], stated[0]), np.zeros(stated[2], np.int64)])
    if not in_turns:
        return np.repeat(np.arange(3), stated)
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * stated[axis] : 3] = axis
    return axes


@dataclass
class MropePositions:
    """Tracks the positions of a sequence. `tokens`: the sequence, append-only; the first `known` are done and the next text token is at
    `following`. `run`: of the image that they end in, its number, columns, first row of the frame, position, and frame offset."""

    tokens: list[int]
    known: int = 0
    following: int = 0
    run: tuple[int, int, int, int, int] | None = None
    FIRST = 0  # first axis number

    def place(self, token: int) -> tuple[int, int, int]:
        """Position triple of the next token."""
        number, said, row = split_media_token(token) if token >= FIRST_MEDIA_ID else (0, 0, 0)
        if not said:
            self.following, self.run = self.following + 1, None
            return (self.following - 1,) * 3
        if self.run is None or self.run[0] != number or not row:
            self.run = number, said, row - row % said, self.following, 0
        elif said != self.run[1]:
            _, columns, _, start, later = self.run
            self.run = number, columns, row, start, later + max(said - FRAME_STEP, 0)
        _, columns, first, start, later = self.run
        line, column = divmod(row - first, columns)
        self.following = max(self.following, start + max(line + 1, columns, later + 1))
        return start + later, start + line, start + column

    def behind(self, ids: Sequence[int], axes: np.ndarray) -> np.ndarray | None:
        """Positions of tokens appended to the sequence: int64 [T], or [T, pairs] with media among them; None where they are sequential."""
        places = self.placed(ids)
        if any(token >= FIRST_MEDIA_ID for token in ids):
            return places[:, axes - self.FIRST]
        return None if self.following == self.known else places[:, 0]

    def placed(self, ids: Sequence[int]) -> np.ndarray:
        """Position triples of tokens appended to the sequence, int64 [T, 3] or, for ORDERED families, [T, 4]."""
        for token in self.tokens[self.known :]:
            self.place(token)
        self.known = len(self.tokens)
        there = replace(self)
        return np.array([there.place(token) for token in ids], np.int64)


@dataclass
class OrderedMropePositions(MropePositions):
    """For ORDERED families. `pictures`: how many images have begun. An image's first and last row are positioned like text, so their ids
    carry no column count; its lines begin with the second row."""

    pictures: int = 0
    FIRST = ORDER

    def place(self, token: int) -> tuple[int, int, int, int]:
        """The four positions of the next token: sequence, column, line, image."""
        _, columns, row = split_media_token(token) if token >= FIRST_MEDIA_ID else (0, 0, 1)
        here, self.following = self.following, self.following + 1
        self.pictures += not row
        if not columns:
            return (here,) * 4
        line, column = divmod(row - 1, columns)
        return here, column, line, self.pictures - 1


def track_positions(tokens: list[int], axes: np.ndarray, markers: tuple[int, ...] = ()) -> MropePositions:
    """Position tracker for a sequence; `markers` in families with a canvas."""
    if markers:
        from .canvas import CanvasPositions

        return CanvasPositions(tokens, markers=markers)
    return (OrderedMropePositions if axes.min() >= ORDER else MropePositions)(tokens)
