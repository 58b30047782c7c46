"""M-RoPE for families that lay an image out on a canvas: the thumbnail is spread over all of it, slices lie side by side, and tokens
between them are pinned to corners. Text continues after the canvas.

Positions follow from token ids alone, as in `mrope.py`. There ids carry the image's column count; here they carry what is needed next. Of
the thumbnail the first row carries its columns, the second the canvas width, the third its height, and the first row of each later line its
line. A thumbnail of one column carries the canvas width in its first row too. Rows of a slice carry its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ... import UsageError
from ..config_reader import Keys
from .mrope import COLUMN_BITS, FIRST_MEDIA_ID, MropePositions, split_media_token

NAMES = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")  # of words around pictures and slices
ON_CANVAS = ("minicpmv4_7",)
NARROW = 1 << COLUMN_BITS - 1  # what is added to a canvas' width by the first row of a picture of one column
Grid = tuple[int, int]
Place = tuple[int, int, int]


def canvas_markers(raw: Mapping[str, object]) -> tuple[int, ...]:
    """Token ids of NAMES in a model's config; empty for families that are not ON_CANVAS. Raises ConfigError."""
    return tuple(Keys(raw).integer(name, low=0) for name in NAMES) if raw.get("model_type") in ON_CANVAS else ()


def spread(length: int, count: int) -> list[int]:
    """Evenly spaced positions of `count` rows over a length, in float32 as torch's linspace."""
    ends = np.float32(length - 1)
    step, at = ends / np.float32(max(count - 1, 1)), np.arange(count, dtype=np.float32)
    return np.where(at < count // 2, step * at, ends - step * (count - 1 - at)).round().astype(np.int64).tolist() if count > 1 else [0]


def row_tags(small: Grid, grid: Grid, piece: Grid) -> tuple[int, ...]:
    """Tags of an image's rows: of the thumbnail `small`, a `grid` of slices, and each `piece` (slice). Raises UsageError for an image too
    elongated for the tag."""
    (lines, columns), (high, wide) = small, (grid[0] * piece[0], grid[1] * piece[1]) if grid[0] else small
    found = [columns] * (lines * columns)
    found[::columns] = spread(high, lines)
    found[0] = columns if columns > 1 else NARROW + wide
    found[1:columns] = [wide, high, *found[3:columns]][: columns - 1]
    found += [piece[1]] * (grid[0] * grid[1] * piece[0] * piece[1])
    untold = columns < 3 and lines == 1 and high > 1
    if untold or max(wide, columns) >= NARROW or max(found) >= 2 * NARROW:
        raise UsageError("this image is too elongated for this model", "crop or split it")
    return tuple(found)


@dataclass
class CanvasPositions(MropePositions):
    """`markers`: ids of the layout tokens, in the order of NAMES. `origin`: position of the current canvas, None outside one; `number`: of
    its image; `canvas`: its height and width, as far as known. `columns` of the current part, its next `row`, and the `line` of the last
    one on the canvas; `corner`: where the current slice begins; `opened`: the thumbnail is complete."""

    markers: tuple[int, ...] = ()
    origin: int | None = None
    number: int = -1
    canvas: Grid = (1, 1)
    columns: int = 0
    row: int = 0
    line: int = 0
    corner: Grid = (0, 0)
    opened: bool = False

    def place(self, token: int) -> Place:
        """Position triple of the next token."""
        if token >= FIRST_MEDIA_ID:
            number, said, row = split_media_token(token)
            if self.origin is None or not row or number != self.number:
                self.origin, self.number, self.canvas, self.opened, self.row = self.following, number, (1, 1), False, 0
            place = (self._of_slice if self.opened else self._of_whole)(said)
            self.row += 1
            self.following = self.origin + max(self.canvas) + 1
            return self._pinned(*place)
        if token not in self.markers or self.origin is None and token != self.markers[0]:
            self.origin, self.following = None, self.following + 1
            return (self.following - 1,) * 3
        if token == self.markers[0]:
            self.origin = None
            return self.following, *(max(self.following - 1, 0),) * 2
        return self._pinned(*self._of_marker(token))

    def _pinned(self, high: int, wide: int) -> Place:
        return self.origin, self.origin + high, self.origin + wide

    def _of_whole(self, said: int) -> Grid:
        """Position of a thumbnail row, whose tag extends what is known of the canvas."""
        high, wide = self.canvas
        if not self.row:
            self.columns = max(said, 1) if said < NARROW else 1
            wide, self.line = (self.columns if self.columns > 1 else said - NARROW), 0
        elif self.row % self.columns == 0:
            self.line, high = said, max(high, said + 1)
        elif self.row == 1:
            wide = said
        elif self.row == 2:
            high = said
        self.canvas = high, wide
        return self.line, spread(wide, self.columns)[self.row % self.columns]

    def _of_slice(self, said: int) -> Grid:
        self.columns = max(said, 1)
        line, column = divmod(self.row, self.columns)
        return self.corner[0] + line, self.corner[1] + column

    def _of_marker(self, token: int) -> Grid:
        """Position of a token between parts, or after the last."""
        _, _, begins, _, newline = self.markers
        (high, wide), (top, left) = self.canvas, self.corner
        if self.row and not self.opened:  # behind the picture made small
            self.opened, self.row, self.columns, self.corner = True, 0, 0, (0, 0)
            return high, wide
        if self.row:  # behind a slice, and where the next one begins
            lines, columns = self.row // self.columns, self.columns
            self.row = 0
            ended = left + columns >= wide
            self.corner = (top + lines, 0) if ended else (top, left + columns)
            return top + lines - 1, left + columns - 1
        if token == begins:
            return self.corner
        return (top - 1, wide) if token == newline and top and not left and top < high else (0, 0)

    def behind(self, ids: Sequence[int], axes: np.ndarray) -> np.ndarray | None:
        """As `MropePositions.behind`; layout tokens have three positions too."""
        places, known = self.placed(ids), len(self.tokens)
        if (places != places[:, :1]).any():
            return places[:, axes]
        return None if np.array_equal(places[:, 0], np.arange(known, known + len(ids))) else places[:, 0]
