"""M-RoPE for families that position an image on a canvas: the thumbnail is spread over all of it, slices are placed side by side, and
tokens between them are at corners. Text continues after the canvas.

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

MARKER_KEYS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")  # config keys of the layout tokens
CANVAS_FAMILIES = ("minicpmv4_7",)
# The first row of a thumbnail of one column carries the canvas width plus this, in place of its columns.
ONE_COLUMN = 1 << COLUMN_BITS - 1
Grid = tuple[int, int]  # rows, columns
Position = tuple[int, int, int]  # time, row, column


def canvas_markers(raw: Mapping[str, object]) -> tuple[int, ...]:
    """The layout token ids of a model's config, in the order of MARKER_KEYS; empty for other families. Raises ConfigError."""
    return tuple(Keys(raw).integer(key, low=0) for key in MARKER_KEYS) if raw.get("model_type") in CANVAS_FAMILIES else ()


def spread(length: int, count: int) -> list[int]:
    """Evenly spaced positions of `count` rows over a length, in float32 as torch's linspace."""
    if count <= 1:
        return [0]
    last = np.float32(length - 1)
    step, index = last / np.float32(count - 1), np.arange(count, dtype=np.float32)
    return np.where(index < count // 2, step * index, last - step * (count - 1 - index)).round().astype(np.int64).tolist()


def row_tags(thumbnail: Grid, grid: Grid, slice_size: Grid) -> tuple[int, ...]:
    """The tags of an image's rows.

    `thumbnail`: rows and columns of the thumbnail
    `grid`: rows and columns of slices, (0, 0) for none
    `slice_size`: rows and columns of each slice

    Raises UsageError for an image too elongated for the tag.
    """
    lines, columns = thumbnail
    height, width = (grid[0] * slice_size[0], grid[1] * slice_size[1]) if grid[0] else thumbnail
    tags = [columns] * (lines * columns)
    tags[::columns] = spread(height, lines)
    tags[0] = columns if columns > 1 else ONE_COLUMN + width
    tags[1:columns] = [width, height, *tags[3:columns]][: columns - 1]
    tags += [slice_size[1]] * (grid[0] * grid[1] * slice_size[0] * slice_size[1])
    lacks_height = columns < 3 and lines == 1 and height > 1
    if lacks_height or max(width, columns) >= ONE_COLUMN or max(tags) >= 2 * ONE_COLUMN:
        raise UsageError("this image is too elongated for this model", "crop or split it")
    return tuple(tags)


@dataclass
class CanvasPositions(MropePositions):
    """Tracks the positions of a sequence whose images are on canvases."""

    markers: tuple[int, ...] = ()  # ids of the layout tokens, in the order of MARKER_KEYS
    origin: int | None = None  # position of the current canvas, None outside one
    number: int = -1  # of its image
    canvas: Grid = (1, 1)  # its height and width, as far as known
    columns: int = 0  # of the current part: the thumbnail or a slice
    row: int = 0  # the next row of this part
    line: int = 0  # of the last row of the thumbnail, on the canvas
    corner: Grid = (0, 0)  # where the current slice begins
    has_thumbnail: bool = False  # the thumbnail is complete

    def next_position(self, token: int) -> Position:
        """Position triple of the next token."""
        if token >= FIRST_MEDIA_ID:
            number, tag, row = split_media_token(token)
            if self.origin is None or not row or number != self.number:
                self.origin, self.number, self.canvas = self.next_text_position, number, (1, 1)
                self.has_thumbnail, self.row = False, 0
            place = self._in_slice(tag) if self.has_thumbnail else self._in_thumbnail(tag)
            self.row += 1
            self.next_text_position = self.origin + max(self.canvas) + 1
            return self._on_canvas(*place)
        if token not in self.markers or self.origin is None and token != self.markers[0]:
            self.origin, self.next_text_position = None, self.next_text_position + 1
            return (self.next_text_position - 1,) * 3
        if token == self.markers[0]:
            self.origin = None
            return self.next_text_position, *(max(self.next_text_position - 1, 0),) * 2
        return self._on_canvas(*self._of_marker(token))

    def _on_canvas(self, line: int, column: int) -> Position:
        return self.origin, self.origin + line, self.origin + column

    def _in_thumbnail(self, tag: int) -> Grid:
        """Canvas position of a thumbnail row, whose tag adds to what is known of the canvas."""
        height, width = self.canvas
        if not self.row:
            self.columns = max(tag, 1) if tag < ONE_COLUMN else 1
            width, self.line = (self.columns if self.columns > 1 else tag - ONE_COLUMN), 0
        elif self.row % self.columns == 0:
            self.line, height = tag, max(height, tag + 1)
        elif self.row == 1:
            width = tag
        elif self.row == 2:
            height = tag
        self.canvas = height, width
        return self.line, spread(width, self.columns)[self.row % self.columns]

    def _in_slice(self, tag: int) -> Grid:
        """Canvas position of a slice's row."""
        self.columns = max(tag, 1)
        line, column = divmod(self.row, self.columns)
        return self.corner[0] + line, self.corner[1] + column

    def _of_marker(self, token: int) -> Grid:
        """Canvas position of a token between parts, or after the last."""
        _, _, slice_start, _, newline = self.markers
        (height, width), (top, left) = self.canvas, self.corner
        if self.row and not self.has_thumbnail:  # after the thumbnail
            self.has_thumbnail, self.row, self.columns, self.corner = True, 0, 0, (0, 0)
            return height, width
        if self.row:  # after a slice: the next one begins to its right, or on the next line of slices
            lines, columns = self.row // self.columns, self.columns
            self.row = 0
            is_last_of_line = left + columns >= width
            self.corner = (top + lines, 0) if is_last_of_line else (top, left + columns)
            return top + lines - 1, left + columns - 1
        if token == slice_start:
            return self.corner
        return (top - 1, width) if token == newline and top and not left and top < height else (0, 0)

    def positions_after(self, ids: Sequence[int], axes: np.ndarray) -> np.ndarray | None:
        """As `MropePositions.positions_after`; layout tokens have three positions too."""
        triples, num_tracked = self.position_triples(ids), len(self.tokens)
        if (triples != triples[:, :1]).any():
            return triples[:, axes]
        is_sequential = np.array_equal(triples[:, 0], np.arange(num_tracked, num_tracked + len(ids)))
        return None if is_sequential else triples[:, 0]
