"""Rotary positions of families in which a picture's tokens have three numbers: one for time, and two for their row and column.

A word has three alike, so a text is turned as ever. Behind a picture of h rows and w columns text goes on max(h, w) positions further, not
as many as the picture has tokens. Both follow from the tokens alone, whose ids say the column count, also where a picture is no longer at
hand. Some families share out the channels in sections, the newer ones in turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..files.small_file import JSON_NBYTES, read_whole

if TYPE_CHECKING:
    from ..config import ModelConfig

# Model type -> channel pairs of each of the three where the config does not say them, and whether they take turns.
SECTIONS = {"glm46v": ((8, 12, 12), False), "glm4v": ((8, 12, 12), False), "glm4v_moe": ((8, 12, 12), False),
            "glm_ocr": ((8, 12, 12), False), "paddleocr_vl": ((16, 24, 24), False), "qwen2_vl": ((16, 24, 24), False),
            "qwen2_5_vl": ((16, 24, 24), False), "qwen2_5_omni": ((16, 24, 24), False), "qwen3_omni_moe": ((24, 20, 20), True),
            "qwen3_vl": ((24, 20, 20), True), "qwen3_vl_moe": ((24, 20, 20), True), "qwen3_5": ((11, 11, 10), True),
            "qwen3_5_moe": ((11, 11, 10), True)}
PICTURED = 1 << 62  # ids from here on are no words: behind it 36 bits of the picture's hash, 11 of its columns and 15 of the row
HASH_BITS, COLUMN_BITS, ROW_BITS = 36, 11, 15


def id_of(number: int, columns: int, row: int) -> int:
    """The token that stands for a row of a picture of so many columns, 0 where its places say nothing."""
    return PICTURED | (number << COLUMN_BITS | columns) << ROW_BITS | row


def parts_of(token: int) -> tuple[int, int, int]:
    """The picture's number, its columns and the row, of a token that is no word."""
    rest = token & PICTURED - 1
    return rest >> COLUMN_BITS + ROW_BITS, rest >> ROW_BITS & (1 << COLUMN_BITS) - 1, rest & (1 << ROW_BITS) - 1


def axes_of(folder: Path, config: ModelConfig) -> np.ndarray | None:
    """Which of the three numbers turns each pair of channels, int64 [pairs]; None for a family that has one. Raises UsageError."""
    raw = json.loads(read_whole(folder / "config.json", JSON_NBYTES)) if (folder / "config.json").is_file() else {}
    if raw.get("model_type") not in SECTIONS:
        return None
    inner = raw.get("thinker_config") or raw
    inner = inner.get("text_config") or inner
    stated = {**(inner.get("rope_scaling") or {}), **(inner.get("rope_parameters") or {})}.get("mrope_section")
    return shared_out(raw["model_type"], stated, config, "config.json: mrope_section")


def shared_out(kind: str, stated: object, config: ModelConfig, where: str) -> np.ndarray | None:
    """`axes_of` for a model type that states its sections at `where`, or says nothing of them (None)."""
    if kind not in SECTIONS:
        return None
    usual, in_turns = SECTIONS[kind]
    stated = usual if stated is None else stated
    turned = next(each for each in config.ropes if each is not None)
    pairs = int(config.head_dim * turned.partial_rotary_factor) // 2
    if not isinstance(stated, list | tuple) or len(stated) != 3 or not all(type(each) is int for each in stated) or sum(stated) != pairs:
        raise UsageError(f"{where} is {stated!r:.60}, which shares out no {pairs} pairs of channels",
                         "fetch the model's files again; text alone works")
    if not in_turns:
        return np.repeat(np.arange(3), stated)
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * stated[axis] : 3] = axis
    return axes


@dataclass
class Followed:
    """Where the tokens of a sequence stand: of the first `known` of `tokens`, a list that only grows, the next word is at `following`.
    `run`: number, first row and position of the picture that they end in."""

    tokens: list[int]
    known: int = 0
    following: int = 0
    run: tuple[int, int, int] | None = None

    def place(self, token: int) -> tuple[int, int, int]:
        """The three numbers of the next token."""
        number, columns, row = parts_of(token) if token >= PICTURED else (0, 0, 0)
        if not columns:
            self.following, self.run = self.following + 1, None
            return (self.following - 1,) * 3
        line, column = divmod(row, columns)
        if self.run is None or self.run[0] != number or not row:
            self.run = number, line, self.following
        _, first, start = self.run
        self.following = max(self.following, start + max(line - first + 1, columns))
        return start, start + line - first, start + column

    def behind(self, ids: Sequence[int], axes: np.ndarray) -> np.ndarray | None:
        """What turns tokens behind all of the sequence: int64 [T], with pictures among them [T, pairs]; None where their order does."""
        for token in self.tokens[self.known :]:
            self.place(token)
        self.known = len(self.tokens)
        there = replace(self)
        places = np.array([there.place(token) for token in ids], np.int64)
        if any(token >= PICTURED for token in ids):
            return places[:, axes]
        return None if self.following == self.known else places[:, 0]
